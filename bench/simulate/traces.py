"""Arrivals: who asks when."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bench.simulate.engine import Request

New = Callable[[], "Request"]
Shape = Sequence[tuple[float, int]]  # (until this time, so many clients)


class Trace(Protocol):
    """A source of requests."""

    def due(self, now: float, inflight: int) -> list[Request]:
        """Requests that arrive by `now`, with so many in the engine."""
        ...

    def next_after(self, now: float) -> float | None:
        """When the next may arrive if none is left in the engine; None: never again."""
        ...


class Clients:
    """A number of clients that changes with time, each asking again once it is answered."""

    def __init__(self, shape: Shape, new: New) -> None:
        self._shape, self._new = shape, new

    def due(self, now: float, inflight: int) -> list[Request]:
        """One request for each client that has none."""
        clients = next((count for until, count in self._shape if now < until), 0)
        return [self._new() for _ in range(clients - inflight)]

    def next_after(self, now: float) -> float | None:
        """The next time that there is a client."""
        began = 0.0
        for until, clients in self._shape:
            if clients and until > now:
                return max(now, began)
            began = until
        return None


class Rounds:
    """Stages of so many clients, each of which lasts until its requests have been answered."""

    def __init__(self, stages: Sequence[tuple[int, int]], new: New) -> None:
        self._stages = list(reversed(stages))  # (clients, requests)
        self._new = new

    def due(self, now: float, inflight: int) -> list[Request]:
        """What the stage's clients ask next; the next stage begins when the last is answered."""
        if inflight == 0 and self._stages and self._stages[-1][1] == 0:
            self._stages.pop()
        if not self._stages:
            return []
        clients, left = self._stages.pop()
        count = min(left, max(0, clients - inflight))
        self._stages.append((clients, left - count))
        return [self._new() for _ in range(count)]

    def next_after(self, now: float) -> float | None:
        """Never: there is always someone in the engine until the end."""
        return None


class Poisson:
    """Requests that come whether or not others were answered, at a rate that changes."""

    def __init__(
        self,
        rate: Callable[[float], float],
        most: float,
        end: float,
        new: New,
        rng: random.Random,
    ) -> None:
        self._rate, self._most, self._end, self._new, self._rng = rate, most, end, new, rng
        self._next = 0.0
        self._advance()

    def due(self, now: float, inflight: int) -> list[Request]:
        """Those that have come since the last call."""
        arrived = []
        while self._next <= now:
            arrived.append(self._new())
            self._advance()
        return arrived

    def next_after(self, now: float) -> float | None:
        """Time of the next arrival; None after the last."""
        return None if self._next == math.inf else self._next

    def _advance(self) -> None:
        """Thinning: candidates at the highest rate, kept in proportion to the rate then."""
        while True:
            self._next += self._rng.expovariate(self._most)
            if self._next > self._end:
                self._next = math.inf
                return
            if self._rng.random() * self._most < self._rate(self._next):
                return


def ramp(start: int, end: int, seconds: float, stages: int = 24) -> Shape:
    """From one number of clients to another, evenly."""
    return [
        (seconds * (i + 1) / stages, round(start + (end - start) * i / (stages - 1)))
        for i in range(stages)
    ]


def burst(low: int, high: int, before: float, during: float, after: float) -> Shape:
    """Few clients, then suddenly many, then few again."""
    return [(before, low), (before + during, high), (before + during + after, low)]


def day(least: float, most: float, period: float) -> Callable[[float], float]:
    """Arrivals per second that rise and fall like a day's."""
    middle, swing = (least + most) / 2.0, (most - least) / 2.0
    return lambda now: middle - swing * math.cos(2.0 * math.pi * now / period)
