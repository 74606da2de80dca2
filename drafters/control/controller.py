"""Adaptive K: the K, 0 included, with the most expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from drafters.config import DrafterConfig
from drafters.control.acceptance import Acceptance
from drafters.control.cost_table import Cell, CostTable, PerTokenCost, bucket_of
from drafters.control.objective import Objective
from drafters.control.policy import Load, Step
from drafters.control.report import Totals, acceptance_rows, cost_rows, why
from drafters.control.tuning import Tuning

PLAIN, DRAFT, DEEPER, SHALLOWER = "plain", "draft", "deeper", "shallower"  # kinds of probe


@dataclass(frozen=True, slots=True)
class KPredictions:
    """What each K takes and makes at a load: [k_max + 1] each."""

    load: Load
    step: int  # number of steps observed before
    seconds: list[float]  # of a steady step
    variances: list[float]  # of the logarithms of `seconds`
    tokens: list[float]  # of a step, over all requests
    goodput: list[float]  # tokens per second, the drafter's share of the prompts included
    values: Sequence[float]  # what to maximise: tokens/s or 1 / TPOT (`Objective.values`)
    optimistic_values: list[float]  # `values` with all doubt in favour of the K


@dataclass(slots=True)
class Probe:
    """A trial of another K for a few steps."""

    k: int
    steps_to_choose: int
    observed: bool = False  # whether a step at its K has been
    lost_tokens: float = 0.0  # to what the K in force would have made; below 0 where it gained


class Controller:
    """A policy whose only clock is the sum of the steps' seconds."""

    def __init__(
        self, k_max: int, *, catch_up_tokens: int = DrafterConfig.catch_up_tokens,
        objective: Objective | None = None, tuning: Tuning | None = None,
    ) -> None:  # fmt: skip
        self.k_max, self._catch_up_tokens = k_max, catch_up_tokens
        self._tuning, self._objective = tuning or Tuning(), objective or Objective()
        self._k = self._switches = self._steps = 0
        self._load, self._batch_steps = Load(0), 0  # the latest; steps that its batch has lasted
        self._probes = dict.fromkeys((DRAFT, PLAIN, DEEPER, SHALLOWER), 0)
        self._allowance = self._lost_tokens = 0.0  # that probes may lose now, that they have lost
        self._lost_s = self._busy_s = 0.0  # seconds lost to probes, seconds of all steps
        self.load_calibration(())

    def load_calibration(self, cells: Iterable[Cell]) -> None:
        """Begin anew from measured costs; steps so far are forgotten, as no user sent them."""
        self.costs = CostTable(self.k_max, self._tuning)
        self.costs.load(cell for cell in cells if cell.k <= self.k_max)
        self.acceptance, self._totals = Acceptance(self.k_max, self._tuning), Totals(self.k_max)
        # Reading by the target, of prompts, and by the drafter, of prompts and in catch-up.
        self._prompt, self._reading = PerTokenCost(self._tuning), PerTokenCost(self._tuning)
        self._prompt_tokens = self._output_tokens = 0.0  # of a step, averaged
        self._unread_tokens_per_request = 0.0  # by the drafter
        self._plain_s = math.inf  # since drafts were made or verified
        self._reset_choice()

    def set_objective(self, objective: Objective) -> None:
        """Change the objective; raises ObjectiveError where `k_max` does not allow it."""
        turns_on = objective.within(self.k_max).adapts and not self._objective.adapts
        self._objective = objective
        self._reset_choice()
        # Whoever turns drafts on is not made to wait until they have paid for themselves.
        self._forgone_seconds = math.inf if turns_on else 0.0

    def _reset_choice(self) -> None:
        self._k = self._k if self._objective.adapts else self.k_limit
        self._predictions: KPredictions | None = None
        self._probe: Probe | None = None
        self._forgone_seconds = self._catch_up_seconds = 0.0  # see `_switch`

    @property
    def k_limit(self) -> int:
        """K where it is pinned; else any may be next."""
        return self.k_max if self._objective.adapts else self._objective.k or 0

    @property
    def max_deferred_steps(self) -> int:
        """Steps that may be observed at once: each while a probe waits for its own."""
        return 1 if self._probe is not None else self._prediction_steps()

    def choose(self, load: Load) -> int:
        """K, 0 to `k_limit`, of the drafter pass at the end of the step that is being scheduled.
        Earlier steps may be observed later: a probe ends when all of its steps have been."""
        same = bucket_of(load.requests) == bucket_of(self._load.requests)
        self._load, self._batch_steps = load, self._batch_steps + 1 if same else 0
        if self._objective.adapts and load.requests and self.costs.measured:
            if self._probe is None or self._probe.steps_to_choose == 0:
                predictions = self._predictions
                if fresh := predictions is None or self._stale(predictions, load):
                    predictions = self._predictions = self._predict(load)
                self._switch(predictions)
                if self._probe is None and fresh:
                    self._probe = self._next_probe(predictions)
            if (probe := self._probe) is not None and probe.steps_to_choose:
                if probe.k or self._plain_s >= self._tuning.settling_s:
                    probe.steps_to_choose -= 1
                return probe.k
        return self._k

    def observe(self, step: Step) -> None:
        """Learn from a step that has run. Steps come in order, each after `choose` of the next."""
        load, tuning = step.load, self._tuning
        self._steps, self._busy_s = self._steps + 1, self._busy_s + step.seconds
        if self._objective.adapts:
            saved = math.exp(-step.seconds / tuning.probe_saved_s) if self._allowance > 0.0 else 1.0
            self._allowance = saved * self._allowance + tuning.probe_share * step.tokens
        self.acceptance.observe(load.requests, step.drafted, step.accepted)
        self._prompt_tokens += (load.prefill_tokens - self._prompt_tokens) / tuning.memory
        self._output_tokens += (step.tokens - self._output_tokens) / tuning.memory
        if load.requests:
            self._learn_seconds(step)
            if self._probe is not None:
                self._count_loss(self._probe, step)
        plain = load.draft_tokens == load.drafts(step.k) == 0
        self._plain_s = self._plain_s + step.seconds if plain else 0.0
        requests = max(1, load.requests)
        unread = self._unread_tokens_per_request + (step.tokens + load.prefill_tokens) / requests
        longest = min(self._catch_up_tokens, load.context_tokens / requests + 1.0)
        self._unread_tokens_per_request = min(longest, unread) if step.k == 0 else 0.0
        self._totals.add(step, self.without_drafts(step))

    def without_drafts(self, step: Step) -> float:
        """Seconds that the step's tokens would have taken at K = 0, its prompts read as well."""
        load = step.load
        if not (step.k or load.draft_tokens) or not load.requests or not self.costs.measured:
            return step.seconds
        plain = self.costs.row(load.requests)[0][0]
        return plain * step.tokens / load.requests + self._prompt.seconds * load.prefill_tokens

    def _learn_seconds(self, step: Step) -> None:
        """Split a step's seconds: reading, and a steady step, which makes the K it verifies."""
        load, costs, seconds, drafting = step.load, self.costs, step.seconds, step.k > 0
        k_verified = load.mean_k(load.draft_tokens, self.k_max)
        k_drafted = load.cost_k(step.k, self.k_max)
        prompts, reading_s = load.prefill_tokens, self._reading_seconds(load, drafting)
        if costs.measured and (prompts or (drafting and not k_verified)):
            extra_s = seconds - costs.row(load.requests)[0][k_verified]
            drafter_share = step.draft_seconds / seconds if prompts else 1.0  # of `extra_s`
            unread = prompts + load.drafts(1) * self._unread_tokens_per_request
            if prompts:
                self._prompt.observe(prompts, (1.0 - drafter_share) * extra_s)
            if drafting and unread:
                self._reading.observe(unread, drafter_share * extra_s)
        steady = k_drafted == k_verified and (k_drafted or self._plain_s >= self._tuning.settling_s)
        if steady and (reading_s or not prompts) and reading_s < seconds:
            noise = (reading_s / seconds) ** 2
            disturbance_ended = costs.observe(load.requests, k_drafted, seconds - reading_s, noise)
            if disturbance_ended:  # what it made of a probe is no debt
                self._allowance = max(0.0, self._allowance)

    def _count_loss(self, probe: Probe, step: Step) -> None:
        """Count what a probe loses, up to the step that verifies its last drafts."""
        load, predictions = step.load, self._predict(step.load)
        rate = predictions.tokens[self._k] / predictions.seconds[self._k]
        probe.observed |= step.k == probe.k
        if probe.observed:
            # Reading that the K in force would do too; a drafter that puts it off catches up.
            seconds = step.seconds - self._reading_seconds(load, self._k > 0)
            lost = seconds * rate - predictions.tokens[load.mean_k(load.draft_tokens, self.k_max)]
            probe.lost_tokens += lost
            self._allowance -= lost
        if probe.steps_to_choose == 0 and (step.k != probe.k or probe.k == self._k):
            self._lost_tokens += max(0.0, probe.lost_tokens)
            self._lost_s += max(0.0, probe.lost_tokens) / rate
            self._probe = None

    def _prediction_steps(self) -> int:
        """Steps that predictions hold (LOG: 28 us each): few while the batch or its K is new."""
        most = self._tuning.averaging_steps
        measured = self.costs.steps(max(1, self._load.requests), self._k)
        return 2 if min(measured, self._batch_steps) < most else most

    def _stale(self, predictions: KPredictions, load: Load) -> bool:
        old, age = predictions.load, self._steps - predictions.step
        same_limits = old.requests_by_draft_limit == load.requests_by_draft_limit
        return old.requests != load.requests or not same_limits or age >= self._prediction_steps()

    def _predict(self, load: Load) -> KPredictions:
        ks, n = range(self.k_max + 1), load.requests
        row, row_variances = self.costs.row(n)
        mean_ks = [load.cost_k(k, self.k_max) for k in ks]
        seconds, variances = [row[k] for k in mean_ks], [row_variances[k] for k in mean_ks]
        tokens = self.acceptance.tokens(load)
        # A drafter that drafts reads the prompts too, an output token's share with each.
        share = self._prompt_tokens / self._output_tokens if self._output_tokens else 0.0
        reading = share * self._reading_price() if self._reading.seconds else 0.0
        goodput = [tokens[k] / (seconds[k] + (k > 0) * reading * tokens[k]) for k in ks]
        prompts = load.prefill_tokens * self._prompt.seconds
        tpots = [n * (seconds[k] + prompts) / tokens[k] for k in ks]
        values = self._objective.values(goodput, tpots)
        # A step may be as cheap as its variance allows, but no cheaper than with fewer drafts. Its
        # tokens are about geometrically distributed; trials are as many as are remembered, or few.
        optimism, trials = self._tuning.optimism, self.acceptance.trials[0] if self.k_max else 1.0
        least = [math.exp(-optimism * math.sqrt(variances[k])) * seconds[k] for k in ks]
        least = list(accumulate(least, max))
        spread = [math.sqrt((1.0 - n / total) / trials) for total in tokens]
        high = [values[k] * seconds[k] / least[k] * math.exp(optimism * spread[k]) for k in ks]
        return KPredictions(load, self._steps, seconds, variances, tokens, goodput, values, high)

    def _reading_seconds(self, load: Load, drafting: bool) -> float:
        """Seconds of a step in which the target, and a drafter that runs, read its prompts."""
        return load.prefill_tokens * (self._prompt.seconds + self._reading.seconds * drafting)

    def _reading_price(self) -> float:
        """Seconds for the drafter to read a token: at most the target's, which are always fresh."""
        reading, prompt = self._reading.seconds, self._prompt.seconds
        return min(reading or prompt, prompt or reading)

    def _catch_up(self, load: Load) -> float:
        """Seconds that the drafter reads what it has not seen, if it is switched on now."""
        unread = load.drafts(1) * self._unread_tokens_per_request + load.prefill_tokens
        return self._reading_price() * unread

    def _switch(self, predictions: KPredictions) -> None:
        """Put the best K in force, if its value is higher by the hysteresis. K = 0 is left by the
        rule of ski rental (Karlin et al., 1988): once drafts would have saved what catching up
        takes. That costs at most twice what it would to know how long the load stays."""
        values, tuning = predictions.values, self._tuning
        best = max(range(len(values)), key=values.__getitem__)
        wanted = (1.0 + tuning.hysteresis) * values[self._k]
        if best == 0 and self._k:  # bad luck at first is not the end: at K = 0 little is learned
            few = 1.0 / self.acceptance.trials[0] - 1.0 / tuning.memory
            spread = 1.0 - predictions.tokens[0] / predictions.tokens[self._k]
            wanted *= math.exp(math.sqrt(max(0.0, few * spread)))
        if values[best] <= wanted:
            self._forgone_seconds = 0.0
            return
        if self._k == 0:
            if not self._forgone_seconds:
                self._catch_up_seconds = self._catch_up(predictions.load)
            self._forgone_seconds += predictions.seconds[0] * (1.0 - values[0] / values[best])
            if self._forgone_seconds < self._catch_up_seconds:
                return
        self._k, self._forgone_seconds = best, 0.0
        self._switches += 1

    def _next_probe(self, predictions: KPredictions) -> Probe | None:
        """A probe of the K that may be better than the one in force, all doubt in its favour; or of
        K = 0, from which savings are counted, if its cost is less certain than a probe's."""
        load, high, tuning = predictions.load, predictions.optimistic_values, self._tuning
        others = [k for k in range(self.k_max + 1) if k != self._k and (load.drafts(k) or not k)]
        k = max(others, key=high.__getitem__, default=self._k)
        if self._k and predictions.variances[0] > tuning.step_noise / tuning.probe_steps:
            k = 0
        elif k == self._k or high[k] <= predictions.values[self._k]:
            return None
        rate = predictions.tokens[self._k] / predictions.seconds[self._k]
        # Fewer drafts never take longer, and doubt counts in the probe's favour here too: an
        # estimate that is too high must not forbid the probe that would correct it.
        seconds = min(predictions.seconds[k], predictions.seconds[max(k, self._k)])
        if k:
            least = seconds * predictions.values[k] / high[k]
            seconds = max(least, min(predictions.seconds[0], seconds))
        steps = tuning.probe_steps + (1.0 if k else tuning.settling_s / seconds)
        lost = max(0.0, steps * (seconds - predictions.tokens[k] / rate))
        if self._k == 0:  # the price of reading is as uncertain as an unmeasured cost
            deviation = tuning.unmeasured_variance**0.5
            lost += self._catch_up(load) * math.exp(-tuning.optimism * deviation)
        # A batch of 1 or 2 steps ends before its probe. At K = 0 the drafter's backlog only grows.
        if self._allowance < lost * rate or (self._k and self._batch_steps < steps):
            return None
        kind = PLAIN if not k else DRAFT if not self._k else DEEPER if k > self._k else SHALLOWER
        self._probes[kind] += 1
        return Probe(k, tuning.probe_steps + (k > 0))

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data for JSON: what it believes, and what that is worth."""
        load = self._load._replace(prefill_tokens=0) if self._load.requests else Load(1)
        goal, costs, waits = self._objective, [], 0.0 < self._forgone_seconds < math.inf
        if self.costs.measured:
            latest = self._predict(load)
            steps = [self.costs.steps(load.requests, k) for k in range(self.k_max + 1)]
            costs = cost_rows(latest.seconds, latest.tokens, latest.goodput, steps)
        return {
            "objective": goal.objective, "k": self._k, "k_max": self.k_max, "tpot_s": goal.tpot_s,
            "why": why(goal, self._k, load.requests, costs, waits),
            "requests": self._load.requests, "waiting": self._load.waiting,
            "switches": self._switches, "acceptance": acceptance_rows(self.acceptance),
            "costs": costs, "probes": dict(self._probes), "probe_seconds": self._lost_s,
            "probe_tokens": self._lost_tokens, "busy_seconds": self._busy_s,
            "totals": self._totals.snapshot(),
        }  # fmt: skip
