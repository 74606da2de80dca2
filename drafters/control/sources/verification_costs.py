"""What verifying drafts and a pass of the head take: seconds, and tokens not made meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from drafters.control.cost_table import Cell, CostTable, bucket_of
from drafters.control.policy import Load, Step
from drafters.control.read_costs import ReadCosts
from drafters.control.tuning import Tuning


class VerificationCosts:
    """The seconds of the two parts of a step, and the rate that turns them into tokens.

    A lookup needs no pass of the head, so that the parts are learnt apart: the target's, by the
    mean number of draft tokens that it verifies, whatever their source, and the head's pass, by its
    requests and K. The rate is that of recent steps.
    """

    def __init__(
        self, k_max: int, max_draft_tokens: int, read_costs: ReadCosts, tuning: Tuning
    ) -> None:
        """`k_max` is the largest K of the head, `max_draft_tokens` the most of any source."""
        self._max_draft_tokens = max_draft_tokens
        self._read_costs = read_costs
        self._tuning = tuning
        verifying = replace(tuning, guessed_terms=tuning.guessed_terms._replace(drafter_pass=0.0))
        self.verification = CostTable(range(max_draft_tokens + 1), verifying)
        self._passes = CostTable(range(k_max + 1), replace(tuning, guessed_terms=tuning.pass_terms))
        # Discounted sums over the steps of one batch.
        self._tokens = 0.0
        self._seconds = 0.0
        self._bucket = -1

    def load_calibration(self, cells: Iterable[Cell]) -> None:
        """Begin with the measured costs of steps without drafts."""
        self.verification.load(cell for cell in cells if cell.k == 0)

    # Learning

    def observe(self, step: Step, reading_s: float, settled: bool) -> None:
        """Learn from a step, in which the target read prompts for `reading_s`. `settled` is
        `Traffic.is_settled`: a step without drafts teaches their cost only then."""
        load = step.load
        seconds = step.seconds - step.draft_seconds - reading_s
        if not load.requests or seconds <= 0.0:
            return
        verified = load.draft_tokens - load.cut_tokens
        mean = min(load.mean_k(verified), self._max_draft_tokens)
        if mean or settled:
            share = mean * load.requests / verified if mean else 1.0
            scaled, variance = self._scaled(load.requests, share, seconds)
            variance += self._read_costs.variance_beside(reading_s, seconds)
            self.verification.observe(load.requests, mean, scaled, variance)
        drafted_for = load.requests_drafted_at(0) - step.looked_up
        reads_more = load.prefill_tokens or step.missed_tokens_read
        if step.k and step.draft_seconds and drafted_for > 0 and not reads_more:
            self._passes.observe(drafted_for, step.k, step.draft_seconds)
        self._average_rate(step, seconds + step.draft_seconds)

    def _scaled(self, requests: int, share: float, seconds: float) -> tuple[float, float]:
        """Scale the seconds of a step to `share` times its draft tokens, which is the nearest whole
        number for each request. Returns these seconds, and the variance that scaling adds to their
        logarithm.

        If few of many requests have drafts, that number is 1, though the step verified fewer draft
        tokens: unscaled, its seconds would make one of each request look as cheap as those few.
        """
        if abs(share - 1.0) < self._tuning.unscaled_share or not self.verification.measured:
            return seconds, 0.0
        plain = self.verification.row(requests)[0].seconds
        scaled = plain + max(0.0, share * (seconds - plain))
        noise = self._tuning.step_noise * ((share * seconds / scaled) ** 2 - 1.0)
        return scaled, max(0.0, noise)

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
        `expected`, that of the head alone, which weighs as `Tuning.rate_prior_tokens`."""
        if bucket_of(load.requests) != self._bucket or not self._seconds:
            return expected
        prior_s = self._tuning.rate_prior_tokens * load.requests / expected
        return (self._tokens + prior_s * expected) / (self._seconds + prior_s)

    def plain_seconds(self, requests: int) -> float | None:
        """Seconds of a step without drafts; None before any was measured."""
        if not self.verification.measured:
            return None
        return self.verification.row(requests)[0].seconds

    def prices(self, requests: int, tokens_per_second: float) -> list[float]:
        """The tokens that the batch would make in the time of verifying n draft tokens of a
        request, by n. All are 0 before any step was measured."""
        if not self.verification.measured:
            return [0.0] * (self._max_draft_tokens + 1)
        return [tokens_per_second * seconds for seconds in self._verify_seconds(requests)]

    def pass_seconds(self, requests: int, k: int) -> tuple[float, float]:
        """Seconds of a pass of the head for one request, and of each further request."""
        if not self._passes.measured:
            return 0.0, 0.0
        one = self._passes.row(1)[k].seconds
        if requests == 1:
            return one, 0.0
        return one, max(0.0, self._passes.row(requests)[k].seconds - one) / (requests - 1)

    def _verify_seconds(self, requests: int) -> list[float]:
        """Seconds that verifying n draft tokens adds to a step, per request, by n, if all requests
        have n.

        They lie on a line through those n that were measured. Singly, each errs by itself, and the
        n with the largest gain would be one whose price is too low.
        """
        row = self.verification.row(requests)
        seconds = [(row[n].seconds - row[0].seconds) / requests for n in row]
        measured = [n for n in self.verification.ks_measured(requests) if n]
        if not measured:
            return seconds
        points = [(n, seconds[n], 1.0 / row[n].variance) for n in measured]
        first_s, further_s = _line(points)
        return [0.0, *(first_s + further_s * n for n in range(len(seconds) - 1))]


def _line(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """The line nearest to points (x, y, weight), by squares, as its y at 1 and its slope: through
    (0, 0) if it would begin below that, or if all points have one x, and never falling."""
    mass = sum(weight for _, _, weight in points)
    mean_x = sum(weight * x for x, _, weight in points) / mass
    mean_y = sum(weight * y for _, y, weight in points) / mass
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    if spread:
        slope = sum(weight * (x - mean_x) * y for x, y, weight in points) / spread
        slope = max(0.0, slope)
        start = mean_y - slope * mean_x
        if start >= 0.0:
            return start + slope, slope
    products = sum(weight * x * y for x, y, weight in points)
    slope = products / sum(weight * x * x for x, _, weight in points)
    return slope, slope
