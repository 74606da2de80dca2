"""Seconds of a steady step at a batch and a K: measured where steps ran, estimated elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drafters.control.tuning import Tuning


class Cell(NamedTuple):
    """Steps of one batch at one K that start-up measured."""

    requests: int
    k: int
    seconds: float  # of a step, the median
    steps: int


class StepCost(NamedTuple):
    """What a steady step is estimated to take now."""

    seconds: float
    variance: float  # of the natural logarithm of `seconds`


@dataclass(slots=True)
class MeasuredCost:
    """What steps of about one batch at one K took."""

    requests: float
    log_seconds: float  # mean of the natural logarithm of a step's seconds
    variance: float  # of `log_seconds` when it was last measured
    steps: int
    measured_at_s: float  # busy seconds of the engine until then


class CostTable:
    """The seconds of a steady step by batch and K.

    Each batch and K that ran has an average over its latest steps. Its variance falls with every
    step and grows with time, as the machine does not stay the same: a hot device, a busy neighbour.
    Batches and K between measured ones are interpolated; a K beyond all of them is estimated in the
    proportion of `Tuning.guessed_terms`. Costs never fall with K: isotonic regression.
    """

    def __init__(self, ks: Sequence[int], tuning: Tuning) -> None:
        self._tuning = tuning
        self._by_k: dict[int, dict[int, MeasuredCost]] = {k: {} for k in ks}  # then by bucket
        self._noise = tuning.step_noise  # variance of one step around its cost, of late
        self._now_s = 0.0  # busy seconds of the engine

    @property
    def measured(self) -> bool:
        """Whether there is anything to estimate from."""
        return any(self._by_k.values())

    def load(self, cells: Iterable[Cell]) -> None:
        """Begin with a calibration: few steps of each cell, perhaps beside a busy process."""
        for cell in cells:
            self._by_k[cell.k][bucket_of(cell.requests)] = MeasuredCost(
                requests=cell.requests,
                log_seconds=math.log(cell.seconds),
                variance=self._tuning.unmeasured_variance,
                steps=cell.steps,
                measured_at_s=self._now_s,
            )

    def steps(self, requests: int, k: int) -> int:
        """Steps measured at K and the nearest batch."""
        measured = self._by_k[k].values()
        if not measured:
            return 0
        return min(measured, key=lambda m: abs(math.log(m.requests / requests))).steps

    def row(self, requests: int) -> dict[int, StepCost]:
        """What a steady step takes at each K."""
        estimates = {k: self._estimate(requests, k) for k in self._by_k}
        variances = [estimate.variance for estimate in estimates.values()]
        logarithms = [math.log(estimate.seconds) for estimate in estimates.values()]
        rising = monotone(logarithms, [1.0 / variance for variance in variances])
        return {
            k: StepCost(math.exp(log_seconds), variance)
            for k, log_seconds, variance in zip(estimates, rising, variances, strict=True)
        }

    def observe(self, requests: int, k: int, seconds: float, extra_variance: float = 0.0) -> None:
        """Learn from a steady step. `extra_variance` is that of the logarithm of its seconds beyond
        that of other steps."""
        self._now_s += seconds
        measured = self._measured_cost(requests, k, seconds)
        variance = self._variance(measured, measured.requests)
        variance = min(self._tuning.unmeasured_variance, variance)
        deviation = math.log(seconds) - self._scaled(measured, requests, k)
        total_variance = variance + extra_variance + self._noise
        # A pause counts as no more than `outlier_deviations`.
        largest = self._tuning.outlier_deviations * math.sqrt(total_variance)
        deviation = max(-largest, min(largest, deviation))
        self._track_noise(deviation**2 - variance - extra_variance)
        weight = variance / total_variance  # as in a Kalman filter of one value
        measured.log_seconds += weight * deviation
        measured.variance = variance * (1.0 - weight)
        measured.steps += 1
        measured.measured_at_s = self._now_s

    def _measured_cost(self, requests: int, k: int, seconds: float) -> MeasuredCost:
        """The entry of a batch and K; a new one begins at its estimate, or at `seconds`."""
        entries = self._by_k[k]
        bucket = bucket_of(requests)
        if bucket not in entries:
            if self.measured:
                seconds = self._estimate(requests, k).seconds
            variance = self._tuning.unmeasured_variance
            log_seconds = math.log(seconds)
            entries[bucket] = MeasuredCost(requests, log_seconds, variance, 0, self._now_s)
        return entries[bucket]

    def _track_noise(self, squared: float) -> None:
        """Average the squared deviation of steps that nothing else explains."""
        tuning = self._tuning
        noise = max(tuning.step_noise, squared)
        self._noise += (noise - self._noise) / tuning.noise_memory_steps

    def _estimate(self, requests: int, k: int) -> StepCost:
        """What a steady step takes at a batch and K now, by itself: other K may contradict it."""
        if self._by_k[k]:
            return self._between_batches(requests, k)
        below = [other for other, entries in self._by_k.items() if entries and other < k]
        above = [other for other, entries in self._by_k.items() if entries and other > k]
        if below and above:
            low, high = below[-1], above[0]
            estimates = self._between_batches(requests, low), self._between_batches(requests, high)
            share = (k - low) / (high - low)
            seconds = (1.0 - share) * estimates[0].seconds + share * estimates[1].seconds
            variance = max(estimate.variance for estimate in estimates)
        else:
            nearest = below[-1] if below else above[0]
            measured = self._between_batches(requests, nearest)
            guess = self._guessed_seconds
            seconds = measured.seconds * guess(requests, k) / guess(requests, nearest)
            variance = measured.variance
        return StepCost(seconds, variance + self._tuning.unmeasured_variance)

    def _between_batches(self, requests: int, k: int) -> StepCost:
        """What a steady step takes at a K that was measured, from the batches next to this one."""
        low, high = self._neighbours(requests, k)
        distance = math.log(high.requests / low.requests)
        share = math.log(requests / low.requests) / distance if distance else 0.0
        log_seconds = (1.0 - share) * self._scaled(low, requests, k)
        log_seconds += share * self._scaled(high, requests, k)
        nearest = high if share > 0.5 else low
        return StepCost(math.exp(log_seconds), self._variance(nearest, requests))

    def _neighbours(self, requests: int, k: int) -> tuple[MeasuredCost, MeasuredCost]:
        """The measured batches of K below and above `requests`: one of them twice beyond all."""
        below: MeasuredCost | None = None
        above: MeasuredCost | None = None
        for entry in self._by_k[k].values():
            if entry.requests <= requests and (below is None or entry.requests > below.requests):
                below = entry
            if entry.requests >= requests and (above is None or entry.requests < above.requests):
                above = entry
        nearest = below or above
        assert nearest is not None  # the K was measured
        return below or nearest, above or nearest

    def _scaled(self, measured: MeasuredCost, requests: int, k: int) -> float:
        """Logarithm of the seconds of `requests` requests, from those of about as many, measured at
        the same K."""
        guess = self._guessed_seconds
        return measured.log_seconds + math.log(guess(requests, k) / guess(measured.requests, k))

    def _guessed_seconds(self, requests: int, k: int) -> float:
        """The guessed seconds of a step, but for a factor common to all steps."""
        terms = self._tuning.guessed_terms
        seconds = terms.step + requests * (terms.request + terms.draft_token * k)
        if k:
            seconds += terms.drafter_pass
        return seconds

    def _variance(self, measured: MeasuredCost, requests: int) -> float:
        """Variance of a measured cost now, at a batch: it grows with age and distance."""
        tuning = self._tuning
        octaves = math.log2(requests / measured.requests)
        age_s = self._now_s - measured.measured_at_s
        return measured.variance + tuning.cost_noise * age_s + tuning.octave_variance * octaves**2


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence to `values` that never falls, by weighted squares: isotonic regression,
    which pools neighbours that are out of order (Ayer et al., 1955)."""
    pools: list[tuple[float, float, int]] = []  # (mean, weight, number of values)
    for value, weight in zip(values, weights, strict=True):
        mean, mass, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            other_mean, other_mass, other_count = pools.pop()
            mean = (other_mean * other_mass + mean * mass) / (other_mass + mass)
            mass += other_mass
            count += other_count
        pools.append((mean, mass, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def bucket_of(requests: float) -> int:
    """Batches that share an entry: 1, 2, 3, 4, 5-6, 7-9, 10-13, ... (half an octave each)."""
    return round(2.0 * math.log2(max(1.0, requests)))
