"""Every response carries x-request-id: the client's own if it is harmless, else a new one."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_KEY = "aerie.request_id"
# Short and plain, so that it can be logged as it is.
_HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestId:
    """Pure ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _HARMLESS.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope[_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


def given_to(scope: Scope) -> dict[str, str]:
    """The header of a request that has been through RequestId, for whoever answers outside it."""
    return {HEADER: scope[_KEY]} if _KEY in scope else {}
