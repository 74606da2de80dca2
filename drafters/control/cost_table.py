"""Seconds of a steady step at a batch and a K, told apart from the machine's pace of the moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, mul
from typing import NamedTuple

from drafters.control.tuning import Tuning


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
    cost: float  # logarithm of the seconds of a step at the usual pace
    variance: float  # of `cost` when it was last measured
    steps: int
    at: float  # busy seconds when it was last measured
    pace: float  # and the pace then


class CostTable:
    """A step takes exp(cost + pace), with a cost for each batch and K.

    Measured costs are interpolated between batches, and four fitted terms carry them to batches
    and K that nobody measured. The pace is what all K have in common just now: a busy neighbour, a
    hot device. How much a step tells of its own cost and how much of the pace follows from their
    variances (a Kalman filter without covariances). Costs never fall with K: estimates that say so
    are averaged by their certainty.
    """

    def __init__(self, k_max: int, tuning: Tuning) -> None:
        self._tuning = tuning
        self._columns: list[dict[int, Entry]] = [{} for _ in range(k_max + 1)]  # by batch bucket
        # Seconds of a step, a request, a draft, a drafter pass.
        self._terms: Sequence[float] = tuning.guess
        self._pace = self._pace_variance = self._now = 0.0
        self._noise = self._most_noise = tuning.step_noise  # variance of a step of late; its peak
        self._odd = False  # whether the last step was an outlier
        self._observed = 0

    @property
    def measured(self) -> bool:
        """Whether there is anything to estimate from."""
        return any(self._columns)

    def load(self, cells: Iterable[Cell]) -> None:
        """Begin with a calibration: few steps of each, at one pace or at several."""
        for cell in cells:
            self._insert(cell.requests, cell.k, math.log(cell.seconds), cell.steps)
        self._fit()

    def observe(self, requests: int, k: int, seconds: float, noise: float = 0.0) -> bool:
        """Learn from a steady step; `noise` is variance beyond that of every step. True: it ends a
        disturbance, which leaves all costs unproven."""
        tuning = self._tuning
        self._now += seconds
        self._pace_variance += tuning.pace_noise * seconds
        entry = self._columns[k].get(bucket_of(requests))
        if entry is None:
            cost = self._estimate(requests, k)[0] if self.measured else math.log(seconds)
            entry = self._insert(requests, k, cost, 0)
        usual = entry.cost + self._fitted(requests, k) - self._fitted(entry.requests, k)
        surprise = math.log(seconds) - usual - self._pace
        variance = min(tuning.unproven, self._variance(entry))
        certain = variance + self._pace_variance + noise
        total = certain + self._noise
        limit = tuning.outlier**2 * total
        excess = min(surprise**2, limit) - certain
        self._noise += (max(tuning.step_noise, excess) - self._noise) / tuning.enough
        odd = surprise**2 > limit
        again, self._odd = odd and self._odd, odd and not self._odd
        self._most_noise = max(self._most_noise, self._noise)
        calm = tuning.outlier**2 * self._noise < self._most_noise
        if calm:
            self._most_noise = self._noise
            for known in chain.from_iterable(column.values() for column in self._columns):
                known.variance = max(known.variance, tuning.unproven)
        if self._odd:  # one alone is a pause and tells nothing
            return calm
        if again:  # two are another pace
            self._pace_variance += surprise**2
            total += surprise**2
        entry.cost += variance / total * surprise
        self._pace += self._pace_variance / total * surprise
        entry.variance = variance * (1.0 - variance / total)
        self._pace_variance *= 1.0 - self._pace_variance / total
        entry.steps, entry.at, entry.pace = entry.steps + 1, self._now, self._pace
        self._observed += 1
        if self._observed.bit_count() == 1:
            self._fit()
        return calm

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

    def _estimate(self, requests: float, k: int) -> tuple[float, float]:
        """Cost at a batch and K, and its variance."""
        entries, by_batch = self._columns[k].values(), attrgetter("requests")
        if not entries:  # the nearest measured K, and rather another that drafts
            near = min(
                (j for j, column in enumerate(self._columns) if column),
                key=lambda j: (k > 0 and j == 0, abs(j - k)),
            )
            cost, variance = self._estimate(requests, near)
            apart = self._fitted(requests, k) - self._fitted(requests, near)
            return cost + apart, variance + self._tuning.unproven
        smaller = [entry for entry in entries if entry.requests <= requests]
        larger = [entry for entry in entries if entry.requests > requests]
        low = max(smaller, key=by_batch) if smaller else min(larger, key=by_batch)
        high = min(larger, key=by_batch) if larger else low
        share = 0.0
        if high is not low:
            share = math.log(requests / low.requests) / math.log(high.requests / low.requests)
        beyond = [entry.cost - self._fitted(entry.requests, k) for entry in (low, high)]
        cost = self._fitted(requests, k) + (1.0 - share) * beyond[0] + share * beyond[1]
        return cost, self._variance(high if share > 0.5 else low, requests)

    def _variance(self, entry: Entry, requests: float | None = None) -> float:
        """Variance of an entry's cost now: it grows with age, and at another pace or batch."""
        tuning = self._tuning
        away = self._pace - entry.pace
        apart = math.log2(requests / entry.requests) if requests else 0.0
        aged = entry.variance + tuning.drift * (self._now - entry.at)
        return aged + tuning.unproven * (away**2 + apart**2)

    def _insert(self, requests: float, k: int, cost: float, steps: int) -> Entry:
        entry = Entry(requests, cost, self._tuning.unproven, steps, self._now, self._pace)
        self._columns[k][bucket_of(requests)] = entry
        return entry

    def _fitted(self, requests: float, k: int) -> float:
        """Cost by the four terms."""
        step, request, draft, drafter = self._terms
        return math.log(step + requests * (request + draft * k) + (drafter if k else 0.0))

    def _fit(self) -> None:
        """Non-negative least squares of the relative error over all entries, from the guess on."""
        tuning, rows = self._tuning, []
        for k, column in enumerate(self._columns):
            for e in column.values():
                shape = (1.0, e.requests, e.requests * k, float(k > 0))
                weight = 1.0 / (self._variance(e) + tuning.step_noise)
                rows.append(([x * math.exp(-e.cost) for x in shape], weight))
        if not rows:
            return
        scale = min(1.0 / sum(map(mul, tuning.guess, xs)) for xs, _ in rows)
        terms = [scale * share for share in tuning.guess]
        for i, term in enumerate(terms):  # the guess weighs as much as a fraction of one entry
            rows.append(([float(i == j) / term for j in range(4)], tuning.step_noise))
        products = [[sum(w * xs[i] * xs[j] for xs, w in rows) for j in range(4)] for i in range(4)]
        sums = [sum(w * xs[i] for xs, w in rows) for i in range(4)]
        for _ in range(50):  # coordinate descent; more sweeps change nothing
            for i, row in enumerate(products):
                rest = sums[i] - sum(map(mul, row, terms)) + row[i] * terms[i]
                terms[i] = max(tuning.step_noise * scale if i == 0 else 0.0, rest / row[i])
        self._terms = terms


class PerTokenCost:
    """Least-squares slope of seconds over tokens, through the origin, with forgetting."""

    def __init__(self, tuning: Tuning) -> None:
        self._share = 1.0 / tuning.enough
        self._work = self._square = 0.0

    @property
    def seconds(self) -> float:
        """Per token; 0 while unknown."""
        return self._work / self._square if self._square else 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """So many tokens took so many seconds more than the step would have without them."""
        self._work += self._share * (tokens * max(0.0, seconds) - self._work)
        self._square += self._share * (tokens * tokens - self._square)


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours that do are averaged by their weights."""
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
