"""Deadlines of a request: for its start in the engine, and for its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from app.errors import NO_RETRY, ApiError
from app.observability import metrics

# Seconds between checks of a request that is late but may already be running.
RECHECK_S = 0.25
HEADER = "x-request-timeout"


class Deadline:
    """Timers of one request. The first to run out sets `expired` (the error) and `kind`."""

    def __init__(self, total_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.kind = ""
        self.expired: asyncio.Future[ApiError] = self._loop.create_future()
        self._total = self._loop.call_later(total_s, self._too_long, total_s)
        self._queue: asyncio.TimerHandle | None = None

    def start_within(
        self, queue_s: float, waits: Callable[[], bool], begun: Callable[[], bool]
    ) -> None:
        """Start the queue timer: after `queue_s` a request that still `waits` expires.

        One that does not wait may be running a long prompt. It is checked again until it waits or
        has `begun` to answer.
        """

        def check() -> None:
            if begun():
                return
            if not waits():
                self._queue = self._loop.call_later(RECHECK_S, check)
                return
            message = f"The request could not be started within {queue_s:g} s; try again later."
            headers = {"Retry-After": str(max(1, math.ceil(queue_s / 4)))}
            self.expire("queue", ApiError(503, message, code="queue_timeout", headers=headers))

        self._queue = self._loop.call_later(queue_s, check)

    def stop(self) -> None:
        """Stop the timers: the answer is complete, though not sent."""
        self._total.cancel()
        if self._queue is not None:
            self._queue.cancel()

    def close(self) -> None:
        """Stop the timers: the request has ended, and nobody waits for `expired`."""
        self.stop()
        self.expired.cancel()

    def _too_long(self, total_s: float) -> None:
        message = f"The request was not finished within {total_s:g} s."
        error = ApiError(504, message, code="request_timeout", headers=dict(NO_RETRY))
        self.expire("total", error)

    def expire(self, kind: str, error: ApiError) -> None:
        """End the request with an error, unless it has one already."""
        if not self.expired.done():
            self.kind = kind
            metrics.EXPIRED.labels(kind).inc()
            self.expired.set_result(error)


def parse_timeout(header: str | None, most_s: float) -> float:
    """Seconds that a request may take: the client's header, at most `most_s`."""
    if header is None:
        return most_s
    try:
        seconds = float(header) if len(header) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"The header '{HEADER}' must be a positive number of seconds.")
    return min(seconds, most_s)
