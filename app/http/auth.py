"""Authentication: each request's API key is checked before its body is read."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.admission.controller import AdmissionController
from app.admission.tenants import Identity
from app.errors import ApiError
from app.http import deadline
from app.http.errors import body
from app.http.request_context import RequestContext, attach
from app.observability import metrics

_CLOSE_UNSUPPORTED = 1003
_FORWARDED = (b"forwarded", b"via", b"x-forwarded-for")


class AuthMiddleware:
    """Pure ASGI middleware that authenticates a request and opens its RequestContext.

    A path is public if it is exactly, as the router compares paths, one of the public paths. Any
    other spelling needs a key. Without a valid key a request to a public path is the anonymous
    tenant's, and no admin's.
    """

    def __init__(
        self,
        app: ASGIApp,
        admission: AdmissionController,
        serves: Callable[[], bool],
        metered: frozenset[str],
        public: frozenset[str] = frozenset(),
    ) -> None:
        self.app = app
        self._admission = admission
        self._serves = serves  # whether the engine takes requests
        self._metered = metered  # paths whose requests count towards limits
        self._public = admission.public | public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": _CLOSE_UNSUPPORTED})
        else:
            await self._identified(scope, receive, send)

    async def _identified(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            context = RequestContext(self._admission, self._identify(scope))
        except ApiError as error:
            await _refuse(scope, receive, send, error, {})
            return
        attach(scope, context)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(context.rate_limit_headers())
            await send(message)

        try:
            if scope["path"] in self._metered and scope["method"] == "POST" and self._serves():
                try:
                    await context.begin(timeout_of(scope, self._admission))
                except ApiError as error:
                    await _refuse(scope, receive, send, error, context.rate_limit_headers())
                    return
            await self.app(scope, receive, send_with_limits)
        finally:
            await context.close()

    def _identify(self, scope: Scope) -> Identity:
        if self._admission.is_foreign(Headers(scope=scope).get("host", "")):
            raise ApiError(
                403,
                "This gateway has no API keys and answers on this machine's addresses only, not "
                "under this Host. Name its origin in --allowed-origins, or use --keys-file.",
                code="host_not_allowed",
            )
        identity = self._admission.identify(
            _secret(scope) if self._admission.keys.guarded else None
        )
        if identity is None and scope["path"] in self._public:
            return self._admission.public_identity
        if identity is None:
            metrics.REFUSED.labels("key").inc()
            raise ApiError(
                401,
                "No valid API key: send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if not self._admission.keys.guarded and _is_forwarded(scope):
            return self._admission.forwarded_identity
        return identity


def _is_forwarded(scope: Scope) -> bool:
    """Whether a proxy says that it hands the request on for a client, which may be elsewhere."""
    return any(name in _FORWARDED for name, _ in scope["headers"])


def timeout_of(scope: Scope, admission: AdmissionController) -> float:
    """Seconds that a request may take. Raises ApiError 400 for an unusable header."""
    header = Headers(scope=scope).get(deadline.HEADER)
    return deadline.parse_timeout(header, admission.settings.request_timeout_s)


def _secret(scope: Scope) -> bytes | None:
    """The key, from OpenAI's header or Anthropic's; None if there is none or there are two.

    Two different keys are refused: a proxy before the gateway may have checked the other one.
    """
    secrets: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            secrets.append(secret.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key":
            secrets.append(value)
    return secrets[0] if secrets and len(set(secrets)) == 1 else None


async def _refuse(
    scope: Scope, receive: Receive, send: Send, error: ApiError, headers: dict[str, str]
) -> None:
    response = JSONResponse(
        body(Request(scope), error), error.status, headers={**headers, **(error.headers or {})}
    )
    await response(scope, receive, send)
