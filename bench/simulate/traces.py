"""Traces of a simulation: when requests arrive."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bench.simulate.engine import Request

New = Callable[[], "Request"]
Shape = Sequence[tuple[float, int]]  # (end in seconds, number of clients until then)


class Trace(Protocol):
    """A source of requests."""

    def due(self, now: float, inflight: int) -> list[Request]:
        """Requests that arrive by `now`, when `inflight` are in the engine."""
        ...

    def next_after(self, now: float) -> float | None:
        """When the next request may arrive if the engine is empty; None if there is none."""
        ...


class Clients:
    """A closed loop of a number of clients that changes with time."""

    def __init__(self, shape: Shape, new: New) -> None:
        self._shape, self._new = shape, new

    def due(self, now: float, inflight: int) -> list[Request]:
        """One request for each client that has none."""
        clients = next((count for until, count in self._shape if now < until), 0)
        return [self._new() for _ in range(clients - inflight)]

    def next_after(self, now: float) -> float | None:
        """The next time at which there is a client; None after the last."""
        began = 0.0
        for until, clients in self._shape:
            if clients and until > now:
                return max(now, began)
            began = until
        return None


class Rounds:
    """A closed loop of stages with a number of clients, each until its requests are answered."""

    def __init__(self, stages: Sequence[tuple[int, int]], new: New) -> None:
        self._stages = list(reversed(stages))  # (clients, requests)
        self._new = new

    def due(self, now: float, inflight: int) -> list[Request]:
        """The next requests of the stage's clients. A stage begins when the one before has been
        answered."""
        if inflight == 0 and self._stages and self._stages[-1][1] == 0:
            self._stages.pop()
        if not self._stages:
            return []
        clients, left = self._stages.pop()
        count = min(left, max(0, clients - inflight))
        self._stages.append((clients, left - count))
        return [self._new() for _ in range(count)]

    def next_after(self, now: float) -> float | None:
        """None: until the end the engine is never empty."""
        return None


class Poisson:
    """An open loop with Poisson arrivals, at a rate that changes with time."""

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
        """The requests that have arrived since the last call."""
        arrived = []
        while self._next <= now:
            arrived.append(self._new())
            self._advance()
        return arrived

    def next_after(self, now: float) -> float | None:
        """Time of the next arrival; None after the last."""
        return None if self._next == math.inf else self._next

    def _advance(self) -> None:
        """Draw the next arrival by thinning: candidates come at the highest rate, and are kept in
        proportion to the rate at their time."""
        while True:
            self._next += self._rng.expovariate(self._most)
            if self._next > self._end:
                self._next = math.inf
                return
            if self._rng.random() * self._most < self._rate(self._next):
                return


def ramp(start: int, end: int, seconds: float, stages: int = 24) -> Shape:
    """A number of clients that changes evenly from `start` to `end`."""
    return [
        (seconds * (i + 1) / stages, round(start + (end - start) * i / (stages - 1)))
        for i in range(stages)
    ]


def burst(low: int, high: int, before: float, during: float, after: float) -> Shape:
    """A burst: `low` clients, then `high`, then `low` again, for these seconds each."""
    return [(before, low), (before + during, high), (before + during + after, low)]


def day(least: float, most: float, period: float) -> Callable[[float], float]:
    """Arrivals per second that rise and fall once in `period` seconds, as over a day."""
    middle, swing = (least + most) / 2.0, (most - least) / 2.0
    return lambda now: middle - swing * math.cos(2.0 * math.pi * now / period)
