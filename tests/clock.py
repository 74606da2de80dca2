"""A clock that stands still unless a test moves it."""

from __future__ import annotations


class Clock:
    """Seconds, as `time.time` or `time.monotonic` would tell them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
