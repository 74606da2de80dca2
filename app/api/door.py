"""The door: every request shows its key here, and most refusals cost no more than this."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import metrics
from app.admission.controller import AdmissionController
from app.admission.tenants import Identity
from app.api import deadline
from app.api.errors import body
from app.api.visit import Visit, attach
from app.engine.supervisor import Engine
from app.errors import ApiError

_CLOSE_UNSUPPORTED = 1003


class Door:
    """Pure ASGI middleware. Paths are public by exact comparison with what the router will
    compare with; any other spelling of a path needs a key."""

    def __init__(
        self,
        app: ASGIApp,
        admission: AdmissionController,
        engine: Engine,
        work: frozenset[str],
        public: frozenset[str] = frozenset(),
    ) -> None:
        self.app = app
        self._admission = admission
        self._engine = engine
        self._work = work  # paths of requests that count
        self._public = admission.public | public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": _CLOSE_UNSUPPORTED})
        elif scope["path"] in self._public:
            await self.app(scope, receive, send)
        else:
            await self._guarded(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            visit = Visit(self._admission, self._identify(scope))
        except ApiError as error:
            await _refuse(scope, receive, send, error, {})
            return
        attach(scope, visit)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(visit.headers())
            await send(message)

        try:
            if scope["path"] in self._work and scope["method"] == "POST" and self._engine.ready:
                try:
                    await visit.begin(total_s(scope, self._admission))
                except ApiError as error:
                    await _refuse(scope, receive, send, error, visit.headers())
                    return
            await self.app(scope, receive, send_with_limits)
        finally:
            await visit.close()

    def _identify(self, scope: Scope) -> Identity:
        identity = self._admission.identify(
            _secret(scope) if self._admission.keys.guarded else None
        )
        if identity is None:
            metrics.REFUSED.labels("key").inc()
            raise ApiError(
                401,
                "No valid API key: send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return identity


def total_s(scope: Scope, admission: AdmissionController) -> float:
    """Seconds that this request may take. Raises ApiError 400 for an unusable header."""
    header = Headers(scope=scope).get(deadline.HEADER)
    return deadline.wanted(header, admission.settings.request_timeout_s)


def _secret(scope: Scope) -> bytes | None:
    """The key, from OpenAI's header or Anthropic's. None if it is missing, or if there are two
    different ones: whoever stands between client and gateway may have read the other."""
    found: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            found.append(secret.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key":
            found.append(value)
    return found[0] if found and len(set(found)) == 1 else None


async def _refuse(
    scope: Scope, receive: Receive, send: Send, error: ApiError, headers: dict[str, str]
) -> None:
    response = JSONResponse(
        body(Request(scope), error), error.status, headers={**headers, **(error.headers or {})}
    )
    await response(scope, receive, send)
