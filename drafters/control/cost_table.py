"""Seconds of a steady step at a batch and a K, told apart from the machine's pace of the moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from drafters.control.calibration import Cell
from drafters.control.tuning import Tuning

_OUTLIER = 3.0  # standard deviations, by definition of the word
_SWEEPS = 50  # of the fit of four terms


@dataclass(slots=True)
class _Entry:
    """Steps of about one batch at one K; a cost is the fitted one times exp(deviation)."""

    requests: float
    deviation: float
    variance: float  # of the deviation when it was last measured
    steps: int
    at: float  # busy seconds when it was last measured
    pace: float  # and the pace then
    when: float  # and the clock


class CostTable:
    """A step takes fitted(batch, K) * exp(deviation + pace).

    `fitted` are four terms, which carry to batches and K that nobody measured. Each measured batch
    and K has a deviation; between batches they are interpolated. The pace is what all K have in
    common just now: a busy neighbour, a hot device. How much a step tells of its own cost and how
    much of the pace follows from their variances (a Kalman filter without covariances). Costs
    never fall with the batch or with K: estimates that say so are averaged by their certainty.
    """

    def __init__(self, k_max: int, tuning: Tuning, clock: Callable[[], float]) -> None:
        self._tuning, self._clock = tuning, clock
        self._columns: list[dict[int, _Entry]] = [{} for _ in range(k_max + 1)]  # by batch bucket
        self._terms: list[float] = []  # seconds of a step, a request, a draft, a drafter pass
        self._pace = self._pace_variance = self._now = 0.0
        self._noise = tuning.step_noise  # variance of a step of late: more beside a busy neighbour
        self._odd = False  # whether the last step was an outlier
        self._observed = 0

    @property
    def measured(self) -> bool:
        """Whether there is anything to estimate from."""
        return bool(self._terms)

    def load(self, cells: Iterable[Cell]) -> None:
        """Begin with a calibration: few steps of each, at one pace or at several."""
        known = list(cells)
        unproven = self._tuning.unproven
        self._fit([(cell.requests, cell.k, cell.seconds, unproven) for cell in known])
        for cell in known:
            deviation = math.log(cell.seconds / self._fitted(cell.requests, cell.k))
            self._insert(cell.requests, cell.k, deviation, unproven, round(cell.weight))

    def observe(self, requests: int, k: int, seconds: float, noise: float = 0.0) -> None:
        """Learn from a steady step; `noise` is variance beyond that of every step."""
        tuning = self._tuning
        self._now += seconds
        if not self.measured:
            self._fit([(requests, k, seconds, tuning.unproven)])
        entry = self._columns[k].get(bucket_of(requests)) or self._insert(
            requests, k, self._deviation(requests, k)[0], tuning.unproven, 0
        )
        fitted = math.log(self._fitted(requests, k))
        surprise = math.log(seconds) - fitted - entry.deviation - self._pace
        self._pace_variance += tuning.pace_noise * seconds
        variance = min(tuning.unproven, self._variance(entry))
        certain = variance + self._pace_variance + noise
        total = certain + self._noise
        odd = surprise * surprise > _OUTLIER**2 * total
        bounded = min(surprise * surprise, _OUTLIER**2 * total)
        self._noise += (
            max(tuning.step_noise, bounded - certain) - self._noise
        ) / tuning.fresh_steps
        again, self._odd = odd and self._odd, odd
        if odd and not again:  # one alone is a pause and tells nothing
            return
        if again:  # two are another pace
            self._pace_variance += surprise * surprise
            total += surprise * surprise
            self._odd = False
        entry.deviation += variance / total * surprise
        self._pace += self._pace_variance / total * surprise
        entry.variance = variance * (1.0 - variance / total)
        self._pace_variance *= 1.0 - self._pace_variance / total
        entry.steps += 1
        entry.requests += (requests - entry.requests) / min(entry.steps, tuning.fresh_steps)
        entry.at, entry.pace, entry.when = self._now, self._pace, self._clock()
        self._observed += 1
        if self._observed & (self._observed - 1) == 0:
            self._refit()

    def row(self, requests: int) -> tuple[list[float], list[float]]:
        """Seconds at each K, and the variance of their logarithms: [k_max + 1] each."""
        logs, variances = [], []
        for k in range(len(self._columns)):
            deviation, variance, least, most = self._deviation(requests, k)
            cost = math.log(self._fitted(requests, k)) + deviation
            logs.append(min(max(cost, least), most))
            variances.append(variance)
        rising = monotone(logs, [1.0 / variance for variance in variances])
        return [math.exp(cost + self._pace) for cost in rising], variances

    def evidence(self, requests: int, k: int) -> tuple[int, float]:
        """Steps measured at K and the nearest batch, and seconds since the last of them."""
        entries = self._columns[k].values()
        if not entries:
            return 0, 0.0
        near = min(entries, key=lambda entry: abs(math.log(entry.requests / requests)))
        return near.steps, self._clock() - near.when

    def _deviation(self, requests: float, k: int) -> tuple[float, float, float, float]:
        """Deviation and its variance, and bounds of log seconds at the usual pace."""
        column = self._columns[k]
        if not column:
            others = [j for j, entries in enumerate(self._columns) if entries and (j or not k)]
            if not others:
                return 0.0, self._tuning.unproven, -math.inf, math.inf
            near = min(others, key=lambda j: abs(j - k))
            deviation, variance, _, _ = self._deviation(requests, near)
            return deviation, variance + self._tuning.unproven, -math.inf, math.inf
        below = above = None
        for entry in column.values():
            if entry.requests <= requests:
                below = entry
            elif above is None:
                above = entry
        if below is None or above is None:
            entry = below or above  # type: ignore[assignment]
            return entry.deviation, self._variance(entry, requests), -math.inf, math.inf
        share = math.log(requests / below.requests) / math.log(above.requests / below.requests)
        deviation = (1.0 - share) * below.deviation + share * above.deviation
        ends = [math.log(self._fitted(e.requests, k)) + e.deviation for e in (below, above)]
        few, many = monotone(ends, [1.0 / self._variance(e) for e in (below, above)])
        near_one = above if share > 0.5 else below
        return deviation, self._variance(near_one, requests), few, many

    def _variance(self, entry: _Entry, requests: float | None = None) -> float:
        """Of what an entry says now: it ages, and tells less of another pace or batch."""
        tuning = self._tuning
        away = self._pace - entry.pace
        apart = math.log2(requests / entry.requests) if requests else 0.0
        return (
            entry.variance
            + tuning.drift * (self._now - entry.at)
            + tuning.unproven * (away * away + apart * apart)
        )

    def _insert(
        self, requests: float, k: int, deviation: float, variance: float, steps: int
    ) -> _Entry:
        entry = _Entry(requests, deviation, variance, steps, self._now, self._pace, self._clock())
        column = self._columns[k]
        column[bucket_of(requests)] = entry
        self._columns[k] = dict(sorted(column.items()))
        return entry

    def _fitted(self, requests: float, k: int) -> float:
        step, request, draft, drafter = self._terms
        return step + requests * (request + draft * k) + (drafter if k else 0.0)

    def _refit(self) -> None:
        before = [
            (k, entry, self._fitted(entry.requests, k))
            for k, column in enumerate(self._columns)
            for entry in column.values()
        ]
        self._fit([
            (entry.requests, k, fitted * math.exp(entry.deviation), self._variance(entry))
            for k, entry, fitted in before
        ])  # fmt: skip
        for k, entry, fitted in before:  # what was measured stays
            entry.deviation += math.log(fitted / self._fitted(entry.requests, k))

    def _fit(self, cells: Sequence[tuple[float, int, float, float]]) -> None:
        """Non-negative least squares of the relative error, from the guess on."""
        tuning = self._tuning
        rows = [
            ([x / seconds for x in (1.0, n, n * k, float(k > 0))], 1.0 / (v + tuning.step_noise))
            for n, k, seconds, v in cells
        ]
        scale = min(1.0 / sum(map(mul, tuning.guess, xs)) for xs, _ in rows)
        terms = [scale * share for share in tuning.guess]
        for i, term in enumerate(terms):  # the guess weighs as much as a fraction of one cell
            rows.append(([float(i == j) / term for j in range(4)], tuning.step_noise))
        products = [[sum(w * xs[i] * xs[j] for xs, w in rows) for j in range(4)] for i in range(4)]
        sums = [sum(w * xs[i] for xs, w in rows) for i in range(4)]
        for _ in range(_SWEEPS):  # coordinate descent
            for i, row in enumerate(products):
                rest = sums[i] - sum(map(mul, row, terms)) + row[i] * terms[i]
                terms[i] = max(tuning.step_noise * scale if i == 0 else 0.0, rest / row[i])
        self._terms = terms


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


@lru_cache(maxsize=4096)
def bucket_of(requests: float) -> int:
    """Batches that share an entry: 1, 2, 3, 4, 5-6, 7-9, 10-13, ... (half an octave each)."""
    return round(2.0 * math.log2(max(1.0, requests)))
