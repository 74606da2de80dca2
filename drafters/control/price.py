"""Seconds a token, of work that steps only sometimes have."""

from __future__ import annotations

LIMIT = 4.0  # times the price so far that one observation may show
MEMORY = 0.05  # share of the past that an observation replaces


class Price:
    """Least-squares slope of seconds over tokens through the origin, with forgetting."""

    def __init__(self) -> None:
        self._work = 0.0  # tokens * seconds
        self._square = 0.0  # tokens * tokens

    @property
    def seconds(self) -> float:
        """Per token; 0 while unknown."""
        return self._work / self._square if self._square else 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """So many tokens took so many seconds more than the step would have without them."""
        seconds = max(0.0, seconds)
        if self.seconds:
            seconds = min(seconds, LIMIT * self.seconds * tokens)
        self._work += MEMORY * (tokens * seconds - self._work)
        self._square += MEMORY * (tokens * tokens - self._square)
