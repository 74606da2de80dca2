"""A training run's budget and its line of progress."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """How far a run is through its budget of minutes or tokens; prints as it goes.

    Schedules read `fraction`, so a run on a slow or busy machine still ends its decay.
    """

    def __init__(
        self,
        *,
        minutes: float | None = None,
        tokens: int | None = None,
        every: float = 20.0,  # seconds between lines
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (minutes is None) == (tokens is None):
            raise ValueError("give a budget of either minutes or tokens")
        self._minutes, self._budget, self._every, self._clock = minutes, tokens, every, clock
        self._start = self._printed = clock()
        self._printed_tokens = 0
        self.tokens = 0
        self.steps = 0

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    @property
    def fraction(self) -> float:
        if self._minutes is not None:
            return min(1.0, self.seconds / (60.0 * self._minutes))
        assert self._budget is not None
        return min(1.0, self.tokens / self._budget)

    def advance(self, tokens: int, **figures: float) -> None:
        """Count one step, and print a line if the last one is old enough."""
        self.tokens += tokens
        self.steps += 1
        now = self._clock()
        if now - self._printed < self._every and self.fraction < 1.0:
            return
        rate = (self.tokens - self._printed_tokens) / max(now - self._printed, 1e-9)
        left = self.seconds * (1.0 - self.fraction) / max(self.fraction, 1e-9)
        shown = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(
            f"step {self.steps} tokens {self.tokens} {rate:.0f} tok/s {shown} "
            f"{100 * self.fraction:.1f}% eta {left / 60:.1f} min",
            flush=True,
        )
        self._printed, self._printed_tokens = now, self.tokens
