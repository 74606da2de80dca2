"""The plan of a step's sources: what lookups and forced spans are worth beside the head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drafters.config import GRAMMAR, LOOKUP
from drafters.control.acceptance import Acceptance
from drafters.control.cost_table import Cell
from drafters.control.policy import Load, Step
from drafters.control.predictions import Predictions
from drafters.control.read_costs import ReadCosts
from drafters.control.sources.draft_plan import MATCH_CLASSES, DraftPlan, Worth, best_worth
from drafters.control.sources.lookup_gains import LookupGains
from drafters.control.sources.span_gains import SpanGains
from drafters.control.sources.verification_costs import VerificationCosts
from drafters.control.tuning import Tuning

NO_LOOKUPS = (Worth(),) * len(MATCH_CLASSES)


class SourcePlanner:
    """Plans the sources of a step's drafts, and learns what they are worth.

    An engine may have neither lookups nor spans. Then there is no plan: the head alone drafts.
    """

    def __init__(
        self,
        k_max: int,
        lookup_tokens: int,
        span_tokens: int,
        acceptance: Acceptance,
        read_costs: ReadCosts,
        tuning: Tuning,
    ) -> None:
        """`lookup_tokens` and `span_tokens` are the most draft tokens of a lookup and of a forced
        span, 0 if there are none. `acceptance` is that of the head, whose largest K is `k_max`."""
        self._head_acceptance = acceptance
        self._read_costs = read_costs
        # Both other sources are priced by what verifying takes.
        self._verification_costs: VerificationCosts | None = None
        self._lookups = LookupGains(lookup_tokens, tuning) if lookup_tokens else None
        self._spans = SpanGains(span_tokens, tuning) if span_tokens else None
        if lookup_tokens or span_tokens:
            most = max(k_max, lookup_tokens, span_tokens)
            self._verification_costs = VerificationCosts(k_max, most, read_costs, tuning)
        self.use(())

    def load_calibration(self, cells: Iterable[Cell]) -> None:
        """Begin with the measured costs of steps without drafts."""
        if self._verification_costs is not None:
            self._verification_costs.load_calibration(cells)

    def use(self, sources: Iterable[str]) -> None:
        """Let these sources draft, and no other. The plan so far is dropped."""
        self._in_use = frozenset(sources)
        self._plan: DraftPlan | None = None
        self._planned_for: tuple[Predictions, int] | None = None

    @property
    def others_draft(self) -> bool:
        """Whether a source other than the head may draft."""
        return self._verification_costs is not None and bool(self._in_use & {LOOKUP, GRAMMAR})

    def plan(self, load: Load, k: int, predictions: Predictions) -> DraftPlan | None:
        """What each source is worth at the end of a step of `load` in which the head drafts K = `k`
        tokens. A plan holds as long as its predictions and its K. None where the head alone drafts.
        """
        if self._verification_costs is None or not self.others_draft:
            return None
        planned_for = self._planned_for
        if planned_for is None or planned_for[0] is not predictions or planned_for[1] != k:
            self._planned_for = predictions, k
            self._plan = self._new_plan(self._verification_costs, load, k, predictions)
        return self._plan

    def _new_plan(
        self, costs: VerificationCosts, load: Load, k: int, predictions: Predictions
    ) -> DraftPlan:
        rate = costs.tokens_per_second(load, predictions.by_k[k].steady_tokens_per_second)
        prices = costs.prices(load.requests, rate)
        plan = self._plan_of_head(costs, load.requests, k, rate, prices)
        if self._lookups is not None and LOOKUP in self._in_use:
            plan = plan._replace(lookups=self._lookups.worth_by_class(prices))
        if self._spans is not None and GRAMMAR in self._in_use:
            plan = plan._replace(spans=self._spans.gains(prices))
        return plan

    def _plan_of_head(
        self,
        costs: VerificationCosts,
        requests: int,
        k: int,
        tokens_per_second: float,
        prices: Sequence[float],
    ) -> DraftPlan:
        """The plan of a step in which only the head may draft, at K = `k`. `prices[n]` is the
        tokens that the batch would make in the time of verifying n draft tokens of a request."""
        if not k:
            return DraftPlan(NO_LOOKUPS)
        survival = self._head_acceptance.survival()[:k]
        first_s, further_s = costs.pass_seconds(requests, k)
        beside_lookups = best_worth(survival, prices)
        # K was chosen because the head is worth its pass, where all requests have it.
        pass_share = tokens_per_second * (first_s + (requests - 1) * further_s) / requests
        alone_gain = max(pass_share, sum(survival) - prices[k])
        return DraftPlan(
            NO_LOOKUPS,
            head_k=beside_lookups.tokens,
            head_gain=beside_lookups.gain,
            alone_gain=alone_gain,
            pass_price=tokens_per_second * first_s,
            further_price=tokens_per_second * further_s,
            read_price=tokens_per_second * self._read_costs.drafter_seconds_per_token,
        )

    def tokens_per_second(self, predictions: Predictions, k: int) -> float:
        """Tokens per second at K = `k` of the head while no prompt is read, with other sources."""
        rate = predictions.by_k[k].steady_tokens_per_second
        if self._verification_costs is None or not self.others_draft:
            return rate
        return max(rate, self._verification_costs.tokens_per_second(predictions.load, rate))

    def plain_seconds(self, requests: int) -> float | None:
        """Seconds of a step without drafts, learnt from steps at any K; None if unknown."""
        if self._verification_costs is None:
            return None
        return self._verification_costs.plain_seconds(requests)

    def observe_comparisons(self, step: Step) -> None:
        """Learn how often the tokens of lookups and forced spans are right."""
        if self._lookups is not None:
            self._lookups.observe(step)
        if self._spans is not None:
            self._spans.observe(step)

    def observe_seconds(self, step: Step, reading_s: float, settled: bool) -> None:
        """Learn what verifying and a pass of the head take from a step in which the target read
        prompts for `reading_s`. `settled` is `Traffic.is_settled`."""
        if self._verification_costs is not None:
            self._verification_costs.observe(step, reading_s, settled)

    def lookup_rows(self) -> list[dict[str, Any]]:
        """The state of lookups, a row for each class of matches; none without lookups."""
        return [] if self._lookups is None else self._lookups.rows()

    def span_row(self) -> dict[str, Any] | None:
        """The state of forced spans; None without them."""
        return None if self._spans is None else self._spans.row()
