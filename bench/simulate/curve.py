"""Acceptance by position, derived from published acceptance lengths."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

POSITIONS = 16
_FLATTEST = 0.99


def length(survival: list[float], k: int) -> float:
    """Acceptance length at K, bonus token included."""
    return 1.0 + sum(survival[:k])


def geometric(first: float, later: float) -> list[float]:
    """Share of drafts accepted up to each position: [POSITIONS]. Conditional acceptance is `first`
    at the first position, `later` at all others."""
    rates = [first] + [later] * (POSITIONS - 1)
    return list(accumulate(rates, lambda reached, rate: reached * rate))


def from_length(k: int, tokens: float) -> list[float]:
    """The curve with equal conditional acceptance at all positions that has this length at K."""
    return _bisect(lambda rate: geometric(rate, rate), k, tokens)


def from_lengths(low_k: int, low: float, high_k: int, high: float) -> list[float]:
    """The curve through two lengths: one conditional acceptance at the first position, another at
    all later ones."""

    def curve(later: float) -> list[float]:
        shape = geometric(1.0, later)
        first = min(1.0, (low - 1.0) / (length(shape, low_k) - 1.0))
        return geometric(first, later)

    return _bisect(curve, high_k, high)


def _bisect(curve: Callable[[float], list[float]], k: int, tokens: float) -> list[float]:
    low, high = 0.0, _FLATTEST
    for _ in range(60):
        middle = (low + high) / 2.0
        if length(curve(middle), k) < tokens:
            low = middle
        else:
            high = middle
    return curve(low)
