"""Every response to a request carries x-request-id: the client's own if it is harmless, else a new
one. Refusals by the connection (app/server/connection.py) and CORS preflights have none.

The paths of an API whose clients look for it in another header have both.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.declaration.answers import OPENAI, AnswerFormat
from app.http.answer_format import attach_format, format_of

HEADER = "x-request-id"
_KEY = "aerie.request_id"
# Short and plain, so that it can be logged as it is.
_HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestIdMiddleware:
    """Pure ASGI middleware that adds the request's id to its response.

    It also attaches the answer format of the request's path, by `answers`.
    """

    def __init__(
        self, app: ASGIApp, answers: Callable[[str], AnswerFormat] = lambda path: OPENAI
    ) -> None:
        self.app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get(HEADER, "")
        request_id = client_id if _HARMLESS.fullmatch(client_id) else f"req_{uuid.uuid4().hex}"
        scope[_KEY] = request_id
        attach_format(scope, self._answers(scope["path"]))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(id_headers(scope))
            await send(message)

        await self.app(scope, receive, send_with_id)


def id_headers(scope: Scope) -> dict[str, str]:
    """The id headers of a request; none before RequestIdMiddleware has seen it."""
    if _KEY not in scope:
        return {}
    request_id: str = scope[_KEY]
    return dict.fromkeys((HEADER, *format_of(scope).id_headers), request_id)
