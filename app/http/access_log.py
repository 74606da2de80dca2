"""Access log and response counter of the paths that run the model or its tokenizer."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http import request_context, request_id
from app.observability import metrics
from app.observability.log import with_fields

logger = logging.getLogger(__name__)

NO_RESPONSE = "none"  # the client left before there was a response


class AccessLogMiddleware:
    """Pure ASGI middleware that counts each response and, with `log`, writes a line for it.

    A label is one of `paths` or a status, never a client's text. A stream counts with the status
    of its headers: an error that ends it later is counted where it happens. The log line has ids,
    counts and times, and nothing else that a client sent.
    """

    def __init__(
        self, app: ASGIApp, paths: frozenset[str], log: bool = False, model: str = ""
    ) -> None:
        self.app = app
        self._paths = paths
        self._log = log
        self._model = model
        if log:  # whoever asks for these lines has them at every --log-level
            logger.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        status, began = NO_RESPONSE, time.monotonic()

        async def send_and_record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_and_record_status)
        except Exception:
            if status == NO_RESPONSE:
                status = "500"  # which Starlette's outermost layer answers from this exception
            raise
        finally:
            metrics.RESPONSES.labels(scope["path"], status).inc()
            if self._log:
                self._write(scope, status, time.monotonic() - began)

    def _write(self, scope: Scope, status: str, seconds: float) -> None:
        fields = {
            "request_id": request_id.id_headers(scope).get(request_id.HEADER),
            "path": scope["path"],
            "status": status,
            "model": self._model,
            "seconds": round(seconds, 4),
            **request_context.log_fields_of(scope),
        }
        logger.info("request", extra=with_fields(fields))
