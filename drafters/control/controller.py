"""Adaptive K: the K, 0 included, with the most expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from drafters.config import DrafterConfig
from drafters.control.acceptance import Acceptance
from drafters.control.cost_table import Cell, CostTable, PerTokenCost, bucket_of
from drafters.control.objective import LATENCY, Objective
from drafters.control.policy import Load, Step
from drafters.control.report import Totals, acceptance_rows, cost_rows, why
from drafters.control.tuning import Tuning

PLAIN, DRAFT, DEEPER, SHALLOWER = "plain", "draft", "deeper", "shallower"  # kinds of probe


@dataclass(frozen=True, slots=True)
class KPredictions:
    """What each K takes and makes at a load: [k_max + 1] each."""

    load: Load
    made_at: int  # steps observed by then
    seconds: list[float]  # of a steady step
    variances: list[float]  # of the logarithms of `seconds`
    tokens: list[float]  # that it makes, over all requests
    goodput: list[float]  # tokens per second, the drafter's share of the prompts included
    values: list[float]  # what the objective maximises
    hopes: list[float]  # `values` with all doubt in favour of the K


@dataclass(slots=True)
class Probe:
    """A trial of another K for a few steps."""

    k: int
    to_choose: int  # steps that are still to be laid out with it
    seen: bool = False  # a step of it has been observed
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
        self._load, self._stays = Load(0), 0  # the latest, and the steps that its batch has lasted
        self._allowance = 0.0  # tokens that probes may lose now
        self._probes = dict.fromkeys((DRAFT, PLAIN, DEEPER, SHALLOWER), 0)
        self._lost_s = self._lost_tokens = self._busy_s = 0.0
        self.load_calibration(())

    def load_calibration(self, cells: Iterable[Cell]) -> None:
        """Begin anew from measured costs; steps so far are forgotten, as no user sent them."""
        self.costs = CostTable(self.k_max, self._tuning)
        self.costs.load(cell for cell in cells if cell.k <= self.k_max)
        self.acceptance, self._totals = Acceptance(self.k_max, self._tuning), Totals(self.k_max)
        # Of a prompt token that the target reads, and of a token that the drafter catches up with.
        self._prompt, self._reading = PerTokenCost(self._tuning), PerTokenCost(self._tuning)
        self._prompts = self._outputs = 0.0  # tokens a step of late
        self._gap = 0.0  # tokens of a request that the drafter has not seen
        self._plain_s = math.inf  # since drafts were made or verified
        self._reconsider()

    def steer(self, objective: Objective) -> None:
        """Change the objective; raises ObjectiveError where `k_max` does not allow it."""
        turns_on = objective.within(self.k_max).adapts and not self._objective.adapts
        self._objective = objective
        self._reconsider()
        # Whoever turns drafts on is not made to wait until they have paid for themselves.
        self._missed = math.inf if turns_on else 0.0

    def _reconsider(self) -> None:
        if not self._objective.adapts:
            self._k = self.k_limit
        self._estimate: KPredictions | None = None
        self._probe: Probe | None = None
        self._missed = 0.0  # seconds that drafts would have saved since they began to promise more
        self._unpaid = 0.0  # what the drafter had to catch up with at that time, in seconds

    @property
    def k_limit(self) -> int:
        """K where it is pinned; else any may be next."""
        return self.k_max if self._objective.adapts else self._objective.k or 0

    @property
    def max_deferred_steps(self) -> int:
        """Steps that may be observed at once: each while a probe waits for its own."""
        return 1 if self._probe is not None else self._lasts()

    def choose(self, load: Load) -> int:
        """K of the drafter pass at the end of the step that is being laid out."""
        same = bucket_of(load.requests) == bucket_of(self._load.requests)
        self._load, self._stays = load, self._stays + 1 if same else 0
        if self._objective.adapts and load.requests and self.costs.measured:
            if self._probe is None or self._probe.to_choose == 0:
                before, estimate = self._estimate, self._estimated(load)
                self._switch(estimate)
                if self._probe is None and estimate is not before:
                    self._probe = self._next_probe(estimate)
            probe = self._probe
            if probe is not None and probe.to_choose:
                if probe.k or self._plain_s >= self._tuning.settling_s:
                    probe.to_choose -= 1
                return probe.k
        return self._k

    def observe(self, step: Step) -> None:
        """Learn from a step that has run."""
        load, tuning = step.load, self._tuning
        self._steps += 1
        self._busy_s += step.seconds
        if self._objective.adapts:
            kept = math.exp(-step.seconds / tuning.probe_saved_s) if self._allowance > 0.0 else 1.0
            self._allowance = kept * self._allowance + tuning.probe_share * step.tokens
        self.acceptance.observe(load.requests, step.drafted, step.accepted)
        self._prompts += (load.prefill_tokens - self._prompts) / tuning.memory_trials
        self._outputs += (step.tokens - self._outputs) / tuning.memory_trials
        if load.requests:
            self._learn_seconds(step)
            if self._probe is not None:
                self._charge(self._probe, step)
        plain = load.draft_tokens == load.drafts(step.k) == 0
        self._plain_s = self._plain_s + step.seconds if plain else 0.0
        requests = max(1, load.requests)
        unseen = self._gap + (step.tokens + load.prefill_tokens) / requests
        longest = min(self._catch_up_tokens, load.context_tokens / requests + 1.0)
        self._gap = min(longest, unseen) if step.k == 0 else 0.0
        self._totals.add(step, self.without_drafts(step))

    def without_drafts(self, step: Step) -> float:
        """Seconds that the step's tokens would have taken at K = 0, its prompts read as well."""
        load = step.load
        if not (step.k or load.draft_tokens) or not load.requests or not self.costs.measured:
            return step.seconds
        plain = self.costs.row(load.requests)[0][0]
        return plain * step.tokens / load.requests + self._prompt.seconds * load.prefill_tokens

    def _learn_seconds(self, step: Step) -> None:
        """Split a step's seconds into what prompts and catching up took, and a steady step's."""
        load, costs, seconds = step.load, self.costs, step.seconds
        verified = self._depth(load, load.draft_tokens)
        asked = self._depth(load, load.drafts(step.k))
        prompts, drafting = load.prefill_tokens, step.k > 0
        read = self._reading_seconds(prompts, drafting)
        if costs.measured and (prompts or (drafting and not verified)):
            more = seconds - costs.row(load.requests)[0][verified]
            drafter = step.draft_seconds / seconds if prompts else 1.0  # share of `more`
            unseen = prompts + load.drafts(1) * self._gap
            if prompts:
                self._prompt.observe(prompts, (1.0 - drafter) * more)
            if drafting and unseen:
                self._reading.observe(unseen, drafter * more)
        if prompts and not read:  # what they take was unknown
            return
        settled = asked > 0 or self._plain_s >= self._tuning.settling_s
        if settled and verified == asked and read < seconds:
            calm = costs.observe(load.requests, asked, seconds - read, (read / seconds) ** 2)
            if calm:  # what a disturbance made of a probe is no debt
                self._allowance = max(0.0, self._allowance)

    def _charge(self, probe: Probe, step: Step) -> None:
        """Count what a probe loses, up to the step that verifies its last drafts."""
        load, known = step.load, self._appraise(step.load)
        rate = known.tokens[self._k] / known.seconds[self._k]
        probe.seen = probe.seen or step.k == probe.k
        if probe.seen:
            # Reading that the K in force would do too; a drafter that puts it off catches up.
            read = self._reading_seconds(load.prefill_tokens, self._k > 0)
            made = known.tokens[self._depth(load, load.draft_tokens)]
            lost = (step.seconds - read) * rate - made
            probe.lost_tokens += lost
            self._allowance -= lost
        if probe.to_choose == 0 and (step.k != probe.k or probe.k == self._k):
            self._lost_tokens += max(0.0, probe.lost_tokens)
            self._lost_s += max(0.0, probe.lost_tokens) / rate
            self._probe = None

    def _estimated(self, load: Load) -> KPredictions:
        known = self._estimate
        if (
            known is None
            or self._steps - known.made_at >= self._lasts()
            or known.load.requests != load.requests
            or known.load.requests_by_draft_limit != load.requests_by_draft_limit
        ):
            known = self._estimate = self._appraise(load)
        return known

    def _lasts(self) -> int:
        """Steps that an estimate is good for: few while the batch or the K in force is new."""
        known = self.costs.steps(max(1, self._load.requests), self._k)
        return 2 if min(known, self._stays) < self._tuning.enough else self._tuning.enough

    def _appraise(self, load: Load) -> KPredictions:
        ks = range(self.k_max + 1)
        row, row_variances = self.costs.row(load.requests)
        depths = [self._depth(load, load.drafts(k)) for k in ks]
        seconds, variances = [row[k] for k in depths], [row_variances[k] for k in depths]
        tokens = self._tokens(load)
        # A drafter that drafts reads the prompts too, an output token's share with each.
        share = self._prompts / self._outputs if self._outputs else 0.0
        entering = share * min(self._reading.seconds, self._reading_price())
        goodput = [tokens[k] / (seconds[k] + (k > 0) * entering * tokens[k]) for k in ks]
        values = goodput
        if self._objective.objective == LATENCY:
            prompts = load.prefill_tokens * self._prompt.seconds
            tpots = [load.requests * (seconds[k] + prompts) / tokens[k] for k in ks]
            held = [goodput[k] * (tpots[k] <= (self._objective.tpot_s or 0.0)) for k in ks]
            values = held if any(held) else [1.0 / tpot for tpot in tpots]
        # A step may be as cheap as its variance allows, but no cheaper than with fewer drafts. Its
        # tokens are about geometrically distributed; trials are as many as are remembered, or few.
        optimism, trials = self._tuning.optimism, self.acceptance.trials[0] if self.k_max else 1.0
        low = [seconds[k] * math.exp(-optimism * math.sqrt(variances[k])) for k in ks]
        low = list(accumulate(low, max))
        spread = [math.sqrt((1.0 - load.requests / n) / trials) for n in tokens]
        hopes = [values[k] * seconds[k] / low[k] * math.exp(optimism * spread[k]) for k in ks]
        return KPredictions(load, self._steps, seconds, variances, tokens, goodput, values, hopes)

    def _depth(self, load: Load, drafts: int) -> int:
        """The K whose steps have so many drafts, where some requests may have fewer than others."""
        return min(self.k_max, max(1, round(drafts / load.requests))) if drafts else 0

    def _tokens(self, load: Load) -> list[float]:
        """Tokens that a step makes at each K."""
        drafting = load.requests_by_draft_limit or (load.requests,) * self.k_max
        made = map(mul, drafting, self.acceptance.survival())
        return list(accumulate(made, initial=float(load.requests)))

    def _reading_seconds(self, prompts: int, drafting: bool) -> float:
        """Seconds of a step in which the target, and a drafter that runs, read its prompts."""
        return prompts * (self._prompt.seconds + self._reading.seconds * drafting)

    def _reading_price(self) -> float:
        """Seconds for the drafter to read a token: at most the target's, which are always fresh."""
        reading, prompt = self._reading.seconds, self._prompt.seconds
        return min(reading or prompt, prompt or reading)

    def _catching_up(self, load: Load) -> float:
        """Seconds that the drafter reads what it has not seen, if it is switched on now."""
        return self._reading_price() * (load.drafts(1) * self._gap + load.prefill_tokens)

    def _switch(self, estimate: KPredictions) -> None:
        """Put the best K in force, if it promises enough more."""
        values, tuning = estimate.values, self._tuning
        best = max(range(len(values)), key=values.__getitem__)
        wanted = (1.0 + tuning.hysteresis) * values[self._k]
        if best == 0 and self._k:  # bad luck at first is not the end: at K = 0 little is learned
            few = 1.0 / self.acceptance.trials[0] - 1.0 / tuning.memory_trials
            spread = 1.0 - estimate.tokens[0] / estimate.tokens[self._k]
            wanted *= math.exp(math.sqrt(max(0.0, few * spread)))
        if values[best] <= wanted:
            self._missed = 0.0
            return
        if self._k == 0:
            # How long the load stays nobody knows. Paying once as much has been missed costs at
            # most twice what knowing it would, and nothing in a dip between two bursts.
            if not self._missed:
                self._unpaid = self._catching_up(estimate.load)
            self._missed += estimate.seconds[0] * (1.0 - values[0] / values[best])
            if self._missed < self._unpaid:
                return
        self._k, self._missed = best, 0.0
        self._switches += 1

    def _next_probe(self, estimate: KPredictions) -> Probe | None:
        """A trial of the K that may be better than the one in force, all doubt in its favour; or of
        K = 0, from which savings are counted, where it is known less well than a trial tells."""
        load, hopes, tuning = estimate.load, estimate.hopes, self._tuning
        others = [k for k in range(self.k_max + 1) if k != self._k and (load.drafts(k) or not k)]
        k = max(others, key=hopes.__getitem__, default=self._k)
        if self._k and estimate.variances[0] > tuning.step_noise / tuning.probe_steps:
            k = 0
        elif k == self._k or hopes[k] <= estimate.values[self._k]:
            return None
        rate = estimate.tokens[self._k] / estimate.seconds[self._k]
        # Fewer drafts never take longer, and doubt counts in the probe's favour here too: an
        # estimate that is too high must not forbid the probe that would correct it.
        seconds = min(estimate.seconds[k], estimate.seconds[max(k, self._k)])
        if k:
            hoped = seconds * estimate.values[k] / hopes[k]
            seconds = max(hoped, min(estimate.seconds[0], seconds))
        steps = tuning.probe_steps + (1.0 if k else tuning.settling_s / seconds)
        lost = max(0.0, steps * (seconds - estimate.tokens[k] / rate))
        if self._k == 0:
            lost += self._catching_up(load) * math.exp(-tuning.optimism * tuning.unproven**0.5)
        # A batch of 1 or 2 steps ends before its trial. At K = 0 the drafter's backlog only grows.
        if self._allowance < lost * rate or (self._k and self._stays < steps):
            return None
        kind = PLAIN if not k else DRAFT if not self._k else DEEPER if k > self._k else SHALLOWER
        self._probes[kind] += 1
        return Probe(k, tuning.probe_steps + (k > 0))

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data for JSON: what it believes, and what that is worth."""
        load = self._load._replace(prefill_tokens=0) if self._load.requests else Load(1)
        costs, waits = [], 0.0 < self._missed < math.inf
        if self.costs.measured:
            known = self._appraise(load)
            steps = [self.costs.steps(load.requests, k) for k in range(self.k_max + 1)]
            costs = cost_rows(known.seconds, known.tokens, known.goodput, steps)
        return {
            "objective": self._objective.objective,
            "k": self._k,
            "k_max": self.k_max,
            "tpot_s": self._objective.tpot_s,
            "why": why(self._objective, self._k, load.requests, costs, waits),
            "requests": self._load.requests,
            "waiting": self._load.waiting,
            "switches": self._switches,
            "acceptance": acceptance_rows(self.acceptance),
            "costs": costs,
            "probes": dict(self._probes),
            "probe_seconds": self._lost_s,
            "probe_tokens": self._lost_tokens,
            "busy_seconds": self._busy_s,
            "totals": self._totals.snapshot(),
        }
