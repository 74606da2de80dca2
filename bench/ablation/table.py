"""Paired ratios of policies with 95% intervals, and which mechanisms pay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load.intervals import Interval, Mean, interval, of_equal_time, of_equal_work, over_best
from bench.load.intervals import speed as mean_speed
from bench.systems.method import Method
from drafters.markdown import columns

GAIN, LOSS = 0.02, 0.01  # what a mechanism must gain somewhere, and may lose nowhere
WITHOUT = "without-"

Cells = Mapping[tuple[Any, ...], Mapping[str, Any]]
Place = tuple[str, str]  # workload, load
Speeds = dict[int, float]  # round -> tokens per second


@dataclass(frozen=True, slots=True)
class Ratio:
    """One policy over another: paired by rounds."""

    value: float
    interval: Interval | None

    def text(self) -> str:
        """For a table."""
        if self.interval is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.interval[0]:.3f} to {self.interval[1]:.3f})"


class Table:
    """Ratios over a reference, by policy and place."""

    def __init__(self, methods: Sequence[Method], cells: Cells, reference: str) -> None:
        self.methods = [m for m in methods if any(key[0] == m.name for key in cells)]
        self.reference = reference
        self.places: list[Place] = list(dict.fromkeys((key[1], key[2]) for key in cells))
        self._speeds: dict[tuple[str, Place], Speeds] = {}
        for (name, workload, load, number), cell in cells.items():
            speeds = self._speeds.setdefault((name, (workload, load)), {})
            speeds[number] = cell["tokens_per_second"]

    def speed(self, name: str, place: Place) -> float | None:
        """Tokens per second over all rounds."""
        speeds = self._speeds.get((name, place))
        return mean_speed(speeds, sorted(speeds), mean=_mean(place)) if speeds else None

    def ratio(self, name: str, over: str, place: Place) -> Ratio | None:
        """At one place, of the rounds that both have."""
        one, other = (self._speeds.get((n, place), {}) for n in (name, over))
        if not set(one) & set(other):
            return None
        return Ratio(*over_best(one, [other], mean=_mean(place)))

    def over_best_fixed(self, name: str, place: Place) -> Ratio | None:
        """Over the fastest fixed K (0 included), which is chosen anew in every resample."""
        fixed = [
            speeds
            for method in self.methods
            if method.kind in ("off", "k") and (speeds := self._speeds.get((method.name, place)))
        ]
        one = self._speeds.get((name, place))
        if not one or not fixed or not set(one).intersection(*fixed):
            return None
        return Ratio(*over_best(one, fixed, mean=_mean(place)))

    def geometric(self, name: str, over: str) -> Ratio | None:
        """Geometric mean over all places, of the rounds that are whole."""
        pairs = [
            (self._speeds.get((name, place), {}), self._speeds.get((over, place), {}), place)
            for place in self.places
        ]
        numbers = sorted(set.intersection(*(set(a) & set(b) for a, b, _ in pairs)))
        if not numbers:
            return None

        def statistic(chosen: Sequence[int]) -> float:
            logs = [
                math.log(
                    mean_speed(a, chosen, mean=_mean(p)) / mean_speed(b, chosen, mean=_mean(p))
                )
                for a, b, p in pairs
            ]
            return math.exp(sum(logs) / len(logs))

        return Ratio(statistic(numbers), interval(numbers, statistic))

    def verdict(self, mechanism: str) -> str:
        """Whether the reference gains from a mechanism that `without-mechanism` lacks."""
        lacking = f"policy:{WITHOUT}{mechanism}"
        found = [self.ratio(self.reference, lacking, place) for place in self.places]
        ratios = [ratio for ratio in found if ratio is not None]
        gains = any(r.value >= 1 + GAIN and r.interval and r.interval[0] > 1 for r in ratios)
        loses = any(r.value < 1 - LOSS for r in ratios)
        return "pays" if gains and not loses else "loses somewhere" if loses else "gains nowhere"

    def text(self) -> str:
        """For people."""
        heads = [f"{workload} {load}" for workload, load in self.places]
        lines = [f"Tokens per second over {self.reference} in the same rounds (95% interval):"]
        rows = [["policy", *heads, "geometric mean"]]
        for method in self.methods:
            ratios = [self.ratio(method.name, self.reference, place) for place in self.places]
            mean = self.geometric(method.name, self.reference)
            rows.append([method.label, *(r.text() if r else "" for r in [*ratios, mean])])
        speeds = [self.speed(self.reference, place) for place in self.places]
        rows.append(["tokens/s of it", *(f"{s:.0f}" if s else "" for s in speeds), ""])
        lines += columns(rows)
        adaptive = [m for m in self.methods if m.kind in ("policy", "adaptive")]
        best = [["over the best fixed K", *heads]]
        for method in adaptive:
            over = [self.over_best_fixed(method.name, place) for place in self.places]
            best.append([method.label, *(r.text() if r else "" for r in over)])
        if any(any(row[1:]) for row in best[1:]):
            lines += ["", *columns(best)]
        mechanisms = [m.title.removeprefix(WITHOUT) for m in self.methods if WITHOUT in m.title]
        if mechanisms:
            title = f"{self.reference.removeprefix('policy:')} has"
            lines += ["", *columns([[title, "it"], *([m, self.verdict(m)] for m in mechanisms)])]
        return "\n".join(lines)


def _mean(place: Place) -> Mean:
    return of_equal_time if place[1].isdigit() else of_equal_work
