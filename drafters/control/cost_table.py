"""Seconds of a steady step at a batch and a K: measured where steps ran, estimated elsewhere."""

from __future__ import annotations

import math
from bisect import bisect_left
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

    requests: int
    log_seconds: float  # natural logarithm of a step's seconds at pace 0
    variance: float  # of `log_seconds` when it was last measured
    steps: int
    measured_at_s: float  # seconds of the steps that the table was told of until then


class CostTable:
    """The seconds of a steady step by batch and K.

    A step takes exp(log_seconds + pace) seconds. Each batch and K that ran has a cost, of which
    every step corrects a part. Its variance falls with every step and grows with time. The pace is
    what all K have in common just now: a hot device, a busy neighbour. Steps of one K tell it for
    all. Batches and K between measured ones are interpolated; a K beyond all of them is estimated
    in the proportion of `Tuning.guessed_terms`. Costs never fall with K: where the estimates do,
    neighbours get their mean (`monotone`). Time is the seconds that the table is told of.
    """

    def __init__(self, ks: Sequence[int], tuning: Tuning) -> None:
        self._tuning = tuning
        self._by_k: dict[int, dict[int, MeasuredCost]] = {k: {} for k in ks}  # then by bucket
        self.noise = tuning.step_noise  # variance of one step around its cost, of late
        self._pace = 0.0  # natural logarithm of how many times as long all steps take just now
        self._now_s = 0.0  # seconds of all steps that the table was told of

    @property
    def measured(self) -> bool:
        """Whether there is anything to estimate from."""
        return any(self._by_k.values())

    def pass_time(self, seconds: float) -> None:
        """Let costs grow older by a step that taught none of them."""
        self._now_s += seconds

    def load(self, cells: Iterable[Cell]) -> None:
        """Begin with a calibration: few steps of each cell, perhaps beside a busy process. No step
        was observed before."""
        for cell in cells:
            self._by_k[cell.k][bucket_of(cell.requests)] = MeasuredCost(
                requests=cell.requests,
                log_seconds=math.log(cell.seconds),
                variance=self._tuning.unmeasured_variance,
                steps=cell.steps,
                measured_at_s=0.0,
            )

    def steps(self, requests: int, k: int) -> int:
        """Steps measured at K in about this batch; 0 where its cost is estimated from others."""
        measured = self._by_k[k].get(bucket_of(requests))
        return 0 if measured is None else measured.steps

    def ks_measured(self, requests: int) -> list[int]:
        """The K that were measured at about this batch."""
        bucket = bucket_of(requests)
        return [k for k, entries in self._by_k.items() if bucket in entries]

    def row(self, requests: int) -> dict[int, StepCost]:
        """What a steady step takes at each K."""
        estimates = self._estimates(requests)
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
        deviation = math.log(seconds) - self._pace - self._log_seconds_at(measured, requests, k)
        total_variance = variance + extra_variance + self.noise
        largest = self._largest_deviation(total_variance)
        deviation = max(-largest, min(largest, deviation))
        self._track_noise(deviation**2 - variance - extra_variance)
        weight = variance / total_variance  # the less certain the cost, the more it is corrected
        measured.log_seconds += weight * deviation
        measured.variance = variance * (1.0 - weight)
        measured.steps += 1
        measured.measured_at_s = self._now_s
        # What neither an uncertain cost nor prompt reading explains is the machine's pace.
        machine_share = self.noise / total_variance
        self._pace += machine_share * deviation / self._tuning.pace_memory_steps

    def longest_seconds(self, seconds: float, variance: float) -> float:
        """The most seconds that a steady step counts as that is estimated to take `seconds`."""
        return seconds * math.exp(self._largest_deviation(variance + self.noise))

    def _largest_deviation(self, variance: float) -> float:
        """How far a step may be from its cost: a pause counts as no more."""
        return self._tuning.outlier_deviations * math.sqrt(variance)

    def _measured_cost(self, requests: int, k: int, seconds: float) -> MeasuredCost:
        """The entry of a batch and K; a new one begins at its estimate, or at `seconds`."""
        entries = self._by_k[k]
        bucket = bucket_of(requests)
        if bucket not in entries:
            if self.measured:
                seconds = self._estimates(requests)[k].seconds
            variance = self._tuning.unmeasured_variance
            log_seconds = math.log(seconds) - self._pace
            entries[bucket] = MeasuredCost(requests, log_seconds, variance, 0, self._now_s)
        return entries[bucket]

    def _track_noise(self, squared: float) -> None:
        """Average the squared deviation of steps that nothing else explains. Each counts as at
        least `Tuning.step_noise`, so that the average is somewhat above the variance."""
        tuning = self._tuning
        noise = max(tuning.step_noise, squared)
        self.noise += (noise - self.noise) / tuning.noise_memory_steps

    def _estimates(self, requests: int) -> dict[int, StepCost]:
        """What a steady step takes at each K, before their order is looked at."""
        measured = {k: self._between_batches(requests, k) for k in self._by_k if self._by_k[k]}
        ks = list(measured)  # rising
        estimates = {}
        for k in self._by_k:
            if k in measured:
                estimates[k] = measured[k]
                continue
            place = bisect_left(ks, k)
            low, high = ks[max(0, place - 1)], ks[min(place, len(ks) - 1)]
            if low == high:
                estimates[k] = self._in_proportion(requests, k, low, measured[low])
            else:
                share = (k - low) / (high - low)
                estimates[k] = self._between(measured[low], measured[high], share)
        return estimates

    def _between(self, low: StepCost, high: StepCost, share: float) -> StepCost:
        """The cost of a K that was not measured, `share` of the way between two that were."""
        seconds = (1.0 - share) * low.seconds + share * high.seconds
        variance = max(low.variance, high.variance) + self._tuning.unmeasured_variance
        return StepCost(seconds, variance)

    def _in_proportion(self, requests: int, k: int, near_k: int, near: StepCost) -> StepCost:
        """The cost of a K beyond all measured ones, from the nearest of them."""
        ratio = self._guessed_seconds(requests, k) / self._guessed_seconds(requests, near_k)
        return StepCost(near.seconds * ratio, near.variance + self._tuning.unmeasured_variance)

    def _between_batches(self, requests: int, k: int) -> StepCost:
        """What a steady step takes at a K that was measured: in this batch, or from those next to
        it."""
        own = self._by_k[k].get(bucket_of(requests))
        if own is not None:
            seconds = math.exp(self._log_seconds_at(own, requests, k) + self._pace)
            return StepCost(seconds, self._variance(own, own.requests))
        low, high = self._neighbours(requests, k)
        distance = math.log(high.requests / low.requests)
        share = math.log(requests / low.requests) / distance if distance else 0.0
        log_seconds = (1.0 - share) * self._log_seconds_at(low, requests, k)
        log_seconds += share * self._log_seconds_at(high, requests, k)
        nearest = high if share > 0.5 else low
        return StepCost(math.exp(log_seconds + self._pace), self._variance(nearest, requests))

    def _neighbours(self, requests: int, k: int) -> tuple[MeasuredCost, MeasuredCost]:
        """The measured batches of K next below and above `requests`: the same twice beyond all."""
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

    def _log_seconds_at(self, measured: MeasuredCost, requests: int, k: int) -> float:
        """The cost of `requests` requests, from that of about as many, measured at the same K."""
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
    """The nearest sequence to `values` that never falls, by weighted squares. Neighbours out of
    order get their weighted mean (isotonic regression: Ayer et al., 1955)."""
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
