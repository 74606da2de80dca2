"""What lookups are worth, learnt from how matches went on and from what verifying takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from drafters.control.acceptance import Acceptance
from drafters.control.cost_table import Cell, CostTable, bucket_of
from drafters.control.policy import Load, Step, counts_above
from drafters.control.sources.draft_plan import MATCH_CLASSES, DraftPlan, Worth, match_class
from drafters.control.tuning import Tuning

# A step teaches the cost of the nearest whole number of draft tokens per request. Its seconds are
# scaled to that number first if the two differ by more than this share.
NEAR = 0.1


class LookupGains:
    """The gains of lookups, of the head beside them, and the price of the head's pass.

    A lookup needs no pass of the head, so that the two parts of a step's seconds are learnt apart:
    the target's, by the mean number of draft tokens that it verifies, whatever their source, and
    the head's pass, by its requests and K.
    """

    def __init__(self, k_max: int, most: int, tuning: Tuning, verified: int = 0) -> None:
        """`k_max` is the largest K of the head, `most` the most draft tokens of a lookup, and
        `verified` that of any source, where it is more."""
        self.most = most
        self._verified = max(k_max, most, verified)
        self._tuning = tuning
        verifying = replace(tuning, guessed_terms=tuning.guessed_terms._replace(drafter_pass=0.0))
        self.verification = CostTable(range(self._verified + 1), verifying)
        self._passes = CostTable(range(k_max + 1), replace(tuning, guessed_terms=tuning.pass_terms))
        self._acceptance = [
            Acceptance(most, replace(tuning, prior_acceptance=prior))
            for prior in tuning.prior_match_acceptance
        ]
        # Sums over the steps of late of one batch, each a part less than the next.
        self._tokens = 0.0
        self._seconds = 0.0
        self._bucket = -1

    def load_calibration(self, cells: Iterable[Cell]) -> None:
        """Begin with the measured costs of steps without drafts."""
        self.verification.load(cell for cell in cells if cell.k == 0)

    # Learning

    def observe(self, step: Step, reading_s: float, settled: bool) -> None:
        """Learn from a step, in which the target read prompts for `reading_s`. `settled` is whether
        a step without drafts takes the time of such steps."""
        self._learn_acceptance(step)
        load = step.load
        seconds = step.seconds - step.draft_seconds - reading_s
        if not load.requests or seconds <= 0.0:
            return
        mean = min(load.mean_k(load.draft_tokens), self._verified)
        if mean or settled:
            scaled, variance = self._scaled(load, mean, seconds)
            variance += (reading_s / step.seconds) ** 2
            self.verification.observe(load.requests, mean, scaled, variance)
        drafted_for = load.requests - step.looked_up
        if step.k and step.draft_seconds and drafted_for > 0 and not load.prefill_tokens:
            self._passes.observe(drafted_for, step.k, step.draft_seconds)
        self._average_rate(step, seconds + step.draft_seconds)

    def _scaled(self, load: Load, mean: int, seconds: float) -> tuple[float, float]:
        """Scale the seconds of a step to `mean` draft tokens per request, the nearest whole number.
        Returns these seconds, and the variance that scaling adds to their logarithm.

        If few of many requests have drafts, that number is 1, which is more than the step verified.
        Unscaled, its seconds would say that a draft token of every request takes no longer.
        """
        share = mean * load.requests / load.draft_tokens if mean else 1.0
        if abs(share - 1.0) < NEAR or not self.verification.measured:
            return seconds, 0.0
        plain = self.verification.row(load.requests)[0].seconds
        scaled = plain + max(0.0, share * (seconds - plain))
        noise = self._tuning.step_noise * ((share * seconds / scaled) ** 2 - 1.0)
        return scaled, max(0.0, noise)

    def _learn_acceptance(self, step: Step) -> None:
        ends: dict[int, tuple[list[int], list[int]]] = {}
        for length, compared, equal in step.matches:
            place = match_class(length)
            if place not in ends:
                ends[place] = [0] * (self.most + 1), [0] * (self.most + 1)
            ends[place][0][compared] += 1
            ends[place][1][equal] += 1
        for place, (compared_ends, equal_ends) in ends.items():
            self._acceptance[place].observe(
                sum(compared_ends), counts_above(compared_ends), counts_above(equal_ends)
            )

    def _average_rate(self, step: Step, seconds: float) -> None:
        if bucket_of(step.load.requests) != self._bucket:
            self._bucket = bucket_of(step.load.requests)
            self._tokens = 0.0
            self._seconds = 0.0
        kept = 1.0 - 1.0 / self._tuning.rate_memory_steps
        self._tokens = kept * self._tokens + step.tokens
        self._seconds = kept * self._seconds + seconds

    # What was learnt

    def tokens_per_second(self, load: Load, expected: float) -> float:
        """Tokens per second of recent steps of about this batch, all sources together. It begins at
        `expected`, that of the head alone, which weighs as four tokens of each request."""
        if bucket_of(load.requests) != self._bucket or not self._seconds:
            return expected
        prior_s = 4.0 * load.requests / expected
        return (self._tokens + prior_s * expected) / (self._seconds + prior_s)

    def plain_seconds(self, requests: int) -> float | None:
        """Seconds of a step without drafts; None before any was measured."""
        if not self.verification.measured:
            return None
        return self.verification.row(requests)[0].seconds

    def prices(self, load: Load, expected: float) -> list[float]:
        """The tokens that the batch would make in the time of verifying n draft tokens of a
        request, by n. `expected` is the tokens per second of the head alone."""
        rate = self.tokens_per_second(load, expected)
        return [rate * seconds for seconds in self._verify_seconds(load.requests)]

    def plan(
        self, load: Load, k: int, survival: Sequence[float], read_s: float, expected: float
    ) -> DraftPlan:
        """The plan of a step of `load` in which the head, at K = `k`, drafts with `survival`.

        `read_s` is the seconds in which the head reads a token that it has missed, `expected` the
        tokens per second of the head alone.
        """
        rate = self.tokens_per_second(load, expected)
        prices = self.prices(load, expected)
        lookups = tuple(
            _best(acceptance.survival(), prices) if acceptance.trials else Worth()
            for acceptance in self._acceptance
        )
        if not k:
            return DraftPlan(lookups)
        first, further = self._pass_seconds(load.requests, k)
        beside = _best(survival[:k], prices)
        # K was chosen because the head is worth its pass, where all requests have it.
        whole = rate * (first + (load.requests - 1) * further) / load.requests
        alone = max(whole, sum(survival[:k]) - prices[k])
        return DraftPlan(
            lookups, beside.tokens, beside.gain, alone, rate * first, rate * further, rate * read_s
        )

    def _verify_seconds(self, requests: int) -> list[float]:
        """Seconds that verifying n draft tokens adds to a step, per request, by n, if all requests
        have n. Beyond the largest n that was measured, seconds are proportional to n."""
        row = self.verification.row(requests)
        measured = max(self.verification.ks_measured(requests), default=0)
        seconds = [(row[n].seconds - row[0].seconds) / requests for n in row]
        if measured:
            each = seconds[measured] / measured
            seconds[measured + 1 :] = [n * each for n in range(measured + 1, len(seconds))]
        return seconds

    def _pass_seconds(self, requests: int, k: int) -> tuple[float, float]:
        """Seconds of a pass of the head for one request, and of each further request."""
        if not self._passes.measured:
            return 0.0, 0.0
        one = self._passes.row(1)[k].seconds
        if requests == 1:
            return one, 0.0
        return one, max(0.0, self._passes.row(requests)[k].seconds - one) / (requests - 1)

    def rows(self) -> list[dict[str, Any]]:
        """A row of the state for each class of matches: the shortest match, how often its first
        token was right, and the mean number that a lookup of all tokens would have right."""
        return [
            {
                "match": shortest,
                "conditional": acceptance.conditional()[0],
                "tokens": math.fsum(acceptance.survival()),
                "trials": acceptance.trials[0],
            }
            for shortest, acceptance in zip(MATCH_CLASSES, self._acceptance, strict=True)
        ]


def _best(survival: Sequence[float], prices: Sequence[float]) -> Worth:
    """The number of draft tokens with the largest gain; prices[n] is that of n tokens."""
    gains = [right - price for right, price in zip(accumulate(survival), prices[1:], strict=False)]
    tokens = max(range(len(gains)), key=gains.__getitem__)
    return Worth(tokens + 1, gains[tokens]) if gains[tokens] > 0.0 else Worth()
