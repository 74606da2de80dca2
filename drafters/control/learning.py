"""Learning from a step's seconds: how many were reading, and what a steady step takes."""

from __future__ import annotations

from drafters.control.cost_table import CostTable
from drafters.control.policy import Step
from drafters.control.predictions import Predictor
from drafters.control.read_costs import ReadCosts
from drafters.control.sources.planner import SourcePlanner
from drafters.control.traffic import Traffic


class StepLearner:
    """Splits the seconds of each step into reading and a steady step, and teaches both costs."""

    def __init__(
        self,
        predictor: Predictor,
        costs: CostTable,
        read_costs: ReadCosts,
        traffic: Traffic,
        planner: SourcePlanner,
    ) -> None:
        self._predictor = predictor
        self._costs = costs
        self._read_costs = read_costs
        self._traffic = traffic
        self._planner = planner

    def observe(self, step: Step) -> None:
        """Learn from the seconds of a step that has requests."""
        reading_s = self._read_costs.prompt_seconds(step.load, step.k > 0)
        read_cost_is_known = reading_s > 0.0 or not step.load.prefill_tokens
        self._learn_read_costs(step)
        if read_cost_is_known:
            target_reading_s = self._read_costs.target.seconds * step.load.prefill_tokens
            self._planner.observe_seconds(step, target_reading_s, self._traffic.is_settled)
        if read_cost_is_known and reading_s < step.seconds and self._is_steady(step):
            seconds = step.seconds - reading_s
            variance = self._read_costs.variance_beside(reading_s, seconds)
            k = self._k_of_verification_cost(step)
            self._costs.observe(step.load.requests, k, seconds, variance)
        else:
            self._costs.pass_time(step.seconds)

    def _learn_read_costs(self, step: Step) -> None:
        """Learn from what a step took beyond a steady one that verifies as many draft tokens: the
        target's reading of prompts, and the drafter's of prompts and of what it had missed. The
        first pass after K = 0 counts as reading too: leaving K = 0 costs that pass."""
        load = step.load
        is_drafting = step.k > 0
        k_verified = self._k_of_verification_cost(step)
        begins_to_draft = is_drafting and not k_verified
        if not self._costs.measured or not (load.prefill_tokens or begins_to_draft):
            return
        if step.others or step.looked_up:  # then its mean K does not tell what it takes
            return
        extra_s = step.seconds - self._costs.row(load.requests)[k_verified].seconds
        drafter_share = step.draft_seconds / step.seconds if load.prefill_tokens else 1.0
        if load.prefill_tokens:
            target_s = (1.0 - drafter_share) * extra_s
            self._read_costs.target.observe(load.prefill_tokens, target_s)
        unread = load.requests_drafted_at(0) * self._traffic.unread_tokens_per_request
        unread += load.prefill_tokens
        if is_drafting and unread:
            self._read_costs.drafter.observe(unread, drafter_share * extra_s)

    def _is_steady(self, step: Step) -> bool:
        """Whether a step's seconds are those of its K: the head drafts as many tokens as the target
        verifies, at most `k_max` a request, and no lookup drafts. At K = 0 the last drafts must
        also be `settling_s` seconds ago."""
        load = step.load
        k_drafted = self._predictor.captured_k(load.cost_k(step.k))
        if k_drafted != self._k_of_verification_cost(step) or step.looked_up:
            return False
        if load.mean_k(load.draft_tokens) > self._predictor.k_max:
            return False
        return k_drafted > 0 or self._traffic.is_settled

    def _k_of_verification_cost(self, step: Step) -> int:
        """The K whose steps take as many seconds: those that verify as many draft tokens a request,
        on average. Those that a grammar cut count too: K costs less where grammars cut much."""
        return self._predictor.captured_k(step.load.mean_k(step.load.draft_tokens))

    def decode_seconds(self, step: Step) -> float:
        """Seconds of a step that count as decoding: all of it, or, if it only reads prompts, what
        the drafter's reading of them takes."""
        if step.load.requests:
            return step.seconds
        if not step.k:
            return 0.0
        return self._read_costs.measured_drafter_seconds_per_token * step.load.prefill_tokens

    def plain_seconds(self, step: Step) -> float:
        """Seconds of decoding that the step's tokens would have taken at K = 0, its prompts read as
        well; 0 for a step that only reads prompts."""
        load = step.load
        if not load.requests:
            return 0.0
        has_drafts = step.k or load.draft_tokens
        if not has_drafts or not self._costs.measured:
            return step.seconds
        plain_seconds = self._planner.plain_seconds(load.requests)
        if not plain_seconds:
            plain_seconds = self._costs.row(load.requests)[0].seconds
        reading = self._read_costs.target.seconds * load.prefill_tokens
        return plain_seconds * step.tokens / load.requests + reading
