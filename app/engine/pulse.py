"""Does the engine advance? A process that lives may be stuck in a step for ever."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pulse:
    """Time without any output of the engine while it has requests, as seen by whoever looks.

    Between two looks at most `longest_look_s` count: when this process itself stood still
    (stopped by a terminal, starved of its processor), the engine's outputs wait unread, and its
    silence says nothing.
    """

    def __init__(
        self,
        timeout_s: float,
        longest_look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._longest_look_s = longest_look_s
        self._clock = clock
        self._looked = clock()
        self._outputs = -1
        self.silent_s = 0.0

    def hung(self, requests: int, outputs: int) -> bool:
        """Look: how many requests the engine has, and how many outputs it has made so far.
        True once it has been silent for too long."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        if requests == 0 or outputs != self._outputs:
            self.silent_s = 0.0
        else:
            self.silent_s += min(passed, self._longest_look_s)
        self._outputs = outputs
        return self.silent_s >= self._timeout_s
