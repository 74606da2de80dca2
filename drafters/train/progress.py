"""The budget of a training run, and the progress line that it prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_BAR = 24  # characters


class Progress:
    """How much of its budget of minutes or tokens a run has spent; prints a line now and then.

    Learning rate schedules read `fraction`, so that a run on a slow machine still ends its decay.
    """

    def __init__(
        self,
        *,
        minutes: float | None = None,
        tokens: int | None = None,
        unit: str = "tokens",  # what is counted, where it is not tokens
        every: float = 20.0,  # seconds between lines; a terminal's line is rewritten each second
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (minutes is None) == (tokens is None):
            raise ValueError("give a budget of either minutes or tokens")
        self._unit = unit
        self._terminal = sys.stdout.isatty()
        self._every = min(every, 1.0) if self._terminal else every
        self._minutes, self._budget, self._clock = minutes, tokens, clock
        self._start = self._printed = clock()
        self._printed_tokens = 0
        self.tokens = 0
        self.steps = 0

    @property
    def seconds(self) -> float:
        """Seconds trained, earlier runs included."""
        return self._clock() - self._start

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent, from 0 to 1."""
        if self._minutes is not None:
            return min(1.0, self.seconds / (60.0 * self._minutes))
        assert self._budget is not None
        return min(1.0, self.tokens / self._budget)

    def state_dict(self) -> dict[str, float]:
        """The state for `load_state_dict` of a resumed run."""
        return {"seconds": self.seconds, "tokens": self.tokens, "steps": self.steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue where an earlier run of the same budget stopped."""
        self._printed = self._clock()
        self._start = self._printed - state["seconds"]
        self.tokens = self._printed_tokens = int(state["tokens"])
        self.steps = int(state["steps"])

    def advance(self, tokens: int, **figures: float) -> None:
        """Count one step, and print a line if the last one is old enough."""
        self.tokens += tokens
        self.steps += 1
        now, fraction = self._clock(), self.fraction
        if now - self._printed < self._every and fraction < 1.0:
            return
        rate = (self.tokens - self._printed_tokens) / max(now - self._printed, 1e-9)
        left = self.seconds * (1.0 - fraction) / max(fraction, 1e-9)
        speed = f"{rate:.0f} {'tok' if self._unit == 'tokens' else self._unit}/s"
        shown = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
        filled = round(_BAR * fraction)
        line = (
            f"[{'#' * filled}{'.' * (_BAR - filled)}] {100 * fraction:.1f}% step {self.steps} "
            f"{self._unit} {self.tokens} {speed} {shown} eta {left / 60:.1f} min"
        )
        if self._terminal:
            print(f"\r{line}\x1b[K", end="\n" if fraction >= 1.0 else "", flush=True)
        else:
            print(line, flush=True)
        self._printed, self._printed_tokens = now, self.tokens
