"""Every response carries x-request-id: the client's own if it is harmless, else a new one.

Anthropic's clients read the same from `request-id`, so their routes have both.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
ANTHROPIC_PATH = "/v1/messages"
_KEY = "aerie.request_id"
# Short and plain, so that it can be logged as it is.
_HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestIdMiddleware:
    """Pure ASGI middleware that adds the request's id to its response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get(HEADER, "")
        request_id = client_id if _HARMLESS.fullmatch(client_id) else f"req_{uuid.uuid4().hex}"
        scope[_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(id_headers(scope))
            await send(message)

        await self.app(scope, receive, send_with_id)


def id_headers(scope: Scope) -> dict[str, str]:
    """The id headers of a request; none before RequestIdMiddleware has seen it."""
    if _KEY not in scope:
        return {}
    names = (HEADER, ANTHROPIC_HEADER) if scope["path"].startswith(ANTHROPIC_PATH) else (HEADER,)
    request_id: str = scope[_KEY]
    return dict.fromkeys(names, request_id)
