"""When a request is given up: not begun in time, or not ended in time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from app import metrics
from app.errors import ApiError

# How often a request that is late, but may be at work already, is looked at again.
LOOK_AGAIN_S = 0.25
HEADER = "x-request-timeout"


class Deadline:
    """Timers over one request. `expired` ends with the error that the client gets, and `kind`
    tells which timer that was."""

    def __init__(self, total_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.kind = ""
        self.expired: asyncio.Future[ApiError] = self._loop.create_future()
        self._total = self._loop.call_later(total_s, self._too_long, total_s)
        self._queue: asyncio.TimerHandle | None = None

    def start_within(
        self, queue_s: float, waits: Callable[[], bool], begun: Callable[[], bool]
    ) -> None:
        """From now on the request waits. At the end of `queue_s` it is given up if it still
        `waits`; if it does not, it may be at work on a long prompt, and has all the time
        until it waits again, or has `begun` to answer."""

        def look() -> None:
            if begun():
                return
            if not waits():
                self._queue = self._loop.call_later(LOOK_AGAIN_S, look)
                return
            message = f"The request could not be started within {queue_s:g} s; try again later."
            headers = {"Retry-After": str(max(1, math.ceil(queue_s / 4)))}
            self._expire("queue", ApiError(503, message, code="queue_timeout", headers=headers))

        self._queue = self._loop.call_later(queue_s, look)

    def close(self) -> None:
        """The request has ended."""
        self._total.cancel()
        if self._queue is not None:
            self._queue.cancel()
        self.expired.cancel()

    def _too_long(self, total_s: float) -> None:
        message = f"The request was not finished within {total_s:g} s."
        self._expire("total", ApiError(504, message, code="request_timeout"))

    def _expire(self, kind: str, error: ApiError) -> None:
        if not self.expired.done():
            self.kind = kind
            metrics.EXPIRED.labels(kind).inc()
            self.expired.set_result(error)


def wanted(header: str | None, most_s: float) -> float:
    """Seconds that a request may take: what the client asks for, within the server's own."""
    if header is None:
        return most_s
    try:
        seconds = float(header) if len(header) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"The header '{HEADER}' must be a positive number of seconds.")
    return min(seconds, most_s)
