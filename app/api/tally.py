"""Counts the answers to requests for work, by path and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import metrics

NO_ANSWER = "none"  # the client left before there was one


class Tally:
    """Pure ASGI middleware. A label is one of `paths` and a status, never a client's text. A
    stream counts as what its headers said: what ends it later is counted where it happens."""

    def __init__(self, app: ASGIApp, paths: frozenset[str]) -> None:
        self.app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        status = NO_ANSWER

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            if status == NO_ANSWER:
                status = "500"  # which Starlette's outermost layer answers from this exception
            raise
        finally:
            metrics.RESPONSES.labels(scope["path"], status).inc()
