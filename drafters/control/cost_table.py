"""Seconds of a steady step at a batch and a K, told apart from the machine's pace of the moment."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter, mul
from typing import NamedTuple

from drafters.control.tuning import CostTerms, Tuning


class Cell(NamedTuple):
    """Steps of one batch at one K that start-up measured."""

    requests: int
    k: int
    seconds: float  # of a step, the median
    steps: int


@dataclass(slots=True)
class Entry:
    """Steps of about one batch at one K."""

    requests: float
    cost: float  # natural logarithm of a step's seconds at pace 0, that of the calibration
    variance: float  # of `cost` when it was last measured
    steps: int
    measured_at: float  # busy seconds of the engine until then
    pace: float  # then: natural logarithm of how many times as long all steps took


class Observation(Enum):
    """What a step's seconds are, compared with what was predicted."""

    NORMAL = auto()
    OUTLIER = auto()  # one alone is a pause and tells nothing
    NEW_PACE = auto()  # the second outlier in a row


class CostTable:
    """A step takes exp(cost + pace) seconds, with a cost for each batch and K.

    Measured costs are interpolated between batches, and four fitted terms carry them to batches
    and K that nobody measured. The pace is what all K have in common just now: a busy neighbour, a
    hot device. A step corrects its cost and the pace by a scalar Kalman update (Kalman, 1960)
    without covariances. Costs never fall with K: isotonic regression (Ayer et al., 1955).
    """

    def __init__(self, k_max: int, tuning: Tuning) -> None:
        self._tuning, self._terms = tuning, tuning.guess
        self._columns: list[dict[int, Entry]] = [{} for _ in range(k_max + 1)]  # by batch bucket
        self._pace = self._pace_variance = self._now = 0.0
        self._noise = self._peak_noise = tuning.step_noise  # variance of a step of late; its peak
        self._latest = Observation.NORMAL
        self._updates = 0

    @property
    def measured(self) -> bool:
        """Whether there is anything to estimate from."""
        return any(self._columns)

    def load(self, cells: Iterable[Cell]) -> None:
        """Begin with a calibration: few steps of each cell, at one pace or at several."""
        for cell in cells:
            self._insert(cell.requests, cell.k, math.log(cell.seconds), cell.steps)
        if self.measured:
            self._fit()

    def observe(self, requests: int, k: int, seconds: float, noise: float = 0.0) -> bool:
        """Learn from a steady step; `noise` is the variance of the logarithm of its seconds beyond
        that of other steps. Returns whether it ends a disturbance: see `_track_noise`."""
        tuning = self._tuning
        self._now += seconds
        self._pace_variance += tuning.pace_noise * seconds
        entry = self._columns[k].get(bucket_of(requests))
        if entry is None:
            cost = self._estimate(requests, k)[0] if self.measured else math.log(seconds)
            entry = self._insert(requests, k, cost, 0)
        usual = entry.cost + self._fitted(requests, k) - self._fitted(entry.requests, k)
        innovation = math.log(seconds) - usual - self._pace
        variance = min(tuning.unmeasured_variance, self._variance(entry, entry.requests))
        predicted = variance + self._pace_variance + noise  # of the innovation, but for step noise
        total = predicted + self._noise
        limit = tuning.outlier**2 * total
        self._latest = self._classify(innovation**2 > limit)
        disturbance_ended = self._track_noise(min(innovation**2, limit) - predicted)
        if self._latest is not Observation.OUTLIER:
            self._update(entry, variance, innovation, total)
        return disturbance_ended

    def row(self, requests: int) -> tuple[list[float], list[float]]:
        """Seconds at each K, and the variance of their logarithms: [k_max + 1] each."""
        estimates = [self._estimate(requests, k) for k in range(len(self._columns))]
        costs, variances = [cost for cost, _ in estimates], [variance for _, variance in estimates]
        rising = monotone(costs, [1.0 / variance for variance in variances])
        return [math.exp(cost + self._pace) for cost in rising], variances

    def steps(self, requests: int, k: int) -> int:
        """Steps measured at K and the nearest batch."""
        entries = self._columns[k].values()
        near = min(entries, key=lambda e: abs(math.log(e.requests / requests)), default=None)
        return near.steps if near else 0

    def _classify(self, far: bool) -> Observation:
        if not far:
            return Observation.NORMAL
        return Observation.NEW_PACE if self._latest is Observation.OUTLIER else Observation.OUTLIER

    def _track_noise(self, excess: float) -> bool:
        """Average `excess`, the squared innovation that nothing else explains. If noise has fallen
        far below its peak, a disturbance is over, and all costs count as unmeasured."""
        tuning = self._tuning
        self._noise += (max(tuning.step_noise, excess) - self._noise) / tuning.averaging_steps
        self._peak_noise = max(self._peak_noise, self._noise)
        ended = tuning.outlier**2 * self._noise < self._peak_noise
        if ended:
            self._peak_noise = self._noise
            for entry in (entry for column in self._columns for entry in column.values()):
                entry.variance = max(entry.variance, tuning.unmeasured_variance)
        return ended

    def _update(self, entry: Entry, variance: float, innovation: float, total: float) -> None:
        """Kalman update of a cost and of the pace. `total` is the variance of the innovation."""
        if self._latest is Observation.NEW_PACE:
            self._pace_variance += innovation**2
            total += innovation**2
        entry.cost += variance / total * innovation
        self._pace += self._pace_variance / total * innovation
        entry.variance = variance * (1.0 - variance / total)
        self._pace_variance *= 1.0 - self._pace_variance / total
        entry.steps, entry.measured_at, entry.pace = entry.steps + 1, self._now, self._pace
        self._updates += 1
        if self._updates.bit_count() == 1:
            self._fit()

    def _estimate(self, requests: float, k: int) -> tuple[float, float]:
        """Cost at a batch and K, and its variance."""
        entries = sorted(self._columns[k].values(), key=attrgetter("requests"))
        if not entries:  # the nearest measured K, and rather another that drafts
            measured = [j for j, column in enumerate(self._columns) if column]
            near = min(measured, key=lambda j: (k > 0 and j == 0, abs(j - k)))
            cost, variance = self._estimate(requests, near)
            difference = self._fitted(requests, k) - self._fitted(requests, near)
            return cost + difference, variance + self._tuning.unmeasured_variance
        above = bisect_right(entries, requests, key=attrgetter("requests"))
        low, high = entries[max(0, above - 1)], entries[min(above, len(entries) - 1)]
        distance = math.log(high.requests / low.requests)
        share = math.log(requests / low.requests) / distance if distance else 0.0
        residuals = [entry.cost - self._fitted(entry.requests, k) for entry in (low, high)]
        cost = self._fitted(requests, k) + (1.0 - share) * residuals[0] + share * residuals[1]
        return cost, self._variance(high if share > 0.5 else low, requests)

    def _variance(self, entry: Entry, requests: float) -> float:
        """Variance of an entry's cost now at a batch: it grows with age, pace and distance."""
        tuning = self._tuning
        shift = self._pace - entry.pace
        octaves = math.log2(requests / entry.requests)
        distance_variance = tuning.unmeasured_variance  # at e times the pace, or twice the batch
        age = tuning.drift * (self._now - entry.measured_at)
        return entry.variance + age + distance_variance * (shift**2 + octaves**2)

    def _insert(self, requests: float, k: int, cost: float, steps: int) -> Entry:
        variance = self._tuning.unmeasured_variance
        entry = Entry(requests, cost, variance, steps, self._now, self._pace)
        self._columns[k][bucket_of(requests)] = entry
        return entry

    def _fitted(self, requests: float, k: int) -> float:
        """Cost by the four terms."""
        terms = self._terms
        drafting = terms.drafter_pass if k else 0.0
        return math.log(terms.step + requests * (terms.request + terms.draft * k) + drafting)

    def _fit(self) -> None:
        """Non-negative least squares of the relative error over all entries, from the guess on."""
        tuning, rows = self._tuning, []
        for k, column in enumerate(self._columns):
            for e in column.values():
                shape = (1.0, e.requests, e.requests * k, float(k > 0))
                weight = 1.0 / (self._variance(e, e.requests) + tuning.step_noise)
                rows.append(([x * math.exp(-e.cost) for x in shape], weight))
        scale = min(1.0 / sum(map(mul, tuning.guess, xs)) for xs, _ in rows)
        terms = [scale * share for share in tuning.guess]
        guess_weight = least_share = tuning.step_noise  # an entry weighs 4 to 100; no step is free
        for i, term in enumerate(terms):
            rows.append(([float(i == j) / term for j in range(4)], guess_weight))
        products = [[sum(w * xs[i] * xs[j] for xs, w in rows) for j in range(4)] for i in range(4)]
        sums = [sum(w * xs[i] for xs, w in rows) for i in range(4)]
        for _ in range(50):  # coordinate descent; more sweeps change nothing
            for i, row in enumerate(products):
                rest = sums[i] - sum(map(mul, row, terms)) + row[i] * terms[i]
                terms[i] = max(least_share * scale if i == 0 else 0.0, rest / row[i])
        self._terms = CostTerms(*terms)


class PerTokenCost:
    """Least-squares slope of seconds over tokens, through the origin, with forgetting."""

    def __init__(self, tuning: Tuning) -> None:
        self._share = 1.0 / tuning.averaging_steps
        self._work = self._square = 0.0

    @property
    def seconds(self) -> float:
        """Seconds per token; 0 before the first observation."""
        return self._work / self._square if self._square else 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """So many tokens took so many seconds more than the step would have without them."""
        self._work += self._share * (tokens * max(0.0, seconds) - self._work)
        self._square += self._share * (tokens * tokens - self._square)


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Isotonic regression: the nearest sequence that never falls, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, count = pools.pop()
            both = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / both, both, count + pool[2])
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]


def bucket_of(requests: float) -> int:
    """Batches that share an entry: 1, 2, 3, 4, 5-6, 7-9, 10-13, ... (half an octave each)."""
    return round(2.0 * math.log2(max(1.0, requests)))
