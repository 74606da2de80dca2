"""Detects a copy of the engine that hangs: its process may live and be stuck in a step for ever."""

from __future__ import annotations

import time
from collections.abc import Callable


class HangDetector:
    """Measures how long one copy of the engine has made no output while it had requests.

    Only an output ends a silence. That all requests have left says nothing: a client may give up
    and try again before each `timeout_s` is over.

    At most `max_gap_s` of the time between two checks counts. When this process itself stood still
    (stopped by a terminal, starved of its processor), the engine's outputs wait unread, and its
    silence says nothing.
    """

    def __init__(
        self,
        timeout_s: float,
        max_gap_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_gap_s = max_gap_s
        self._clock = clock
        self._checked_at = clock()
        self._outputs = -1
        self.silent_s = 0.0

    def hung(self, requests: int, outputs: int) -> bool:
        """Check the copy: True once it has been silent for `timeout_s`.

        `requests` is how many it has now, `outputs` how many it has made so far.
        """
        now = self._clock()
        elapsed, self._checked_at = now - self._checked_at, now
        if outputs != self._outputs:
            self.silent_s = 0.0
        elif requests:
            self.silent_s += min(elapsed, self._max_gap_s)
        self._outputs = outputs
        return self.silent_s >= self._timeout_s
