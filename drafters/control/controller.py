"""Adaptive K: the K, 0 included, with the most expected tokens per second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from drafters.config import DrafterConfig
from drafters.control.acceptance import Acceptance
from drafters.control.calibration import Cell
from drafters.control.cost_table import CostTable
from drafters.control.objective import LATENCY, Objective
from drafters.control.policy import Load, Step
from drafters.control.report import Beliefs, Totals, acceptance_rows, cost_rows, why
from drafters.control.tuning import Tuning

PLAIN, DRAFT, DEEPER, SHALLOWER = "plain", "draft", "deeper", "shallower"  # kinds of trial
STEADY = 0.25  # a step is of K if its verified drafts are within this of requests * K


@dataclass(frozen=True, slots=True)
class Estimate:
    """What each K takes and makes at a load: [k_max + 1] each."""

    load: Load
    seconds: list[float]  # of a steady step
    tokens: list[float]  # that it makes, over all requests
    goodput: list[float]  # tokens per second, the drafter's share of the prompts included
    values: list[float]  # what the objective maximises
    doubt: list[float]  # factor by which a K may be better than it looks
    luck: list[float]  # deviation of its tokens that few trials leave, as a logarithm
    variances: list[float]  # of its seconds, as logarithms
    steps: int  # observed when it was made


@dataclass(slots=True)
class Probe:
    """A trial of another K under way."""

    k: int
    requests: int
    rate: float  # tokens per second of what it interrupts
    to_choose: int
    seen: bool = False  # a step of it has been observed


class PerTokenCost:
    """Least-squares slope of seconds over tokens, through the origin, with forgetting."""

    def __init__(self, tuning: Tuning) -> None:
        self._share = 1.0 / tuning.fresh_steps
        self._work = self._square = 0.0

    @property
    def seconds(self) -> float:
        """Per token; 0 while unknown."""
        return self._work / self._square if self._square else 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """So many tokens took so many seconds more than the step would have without them."""
        self._work += self._share * (tokens * max(0.0, seconds) - self._work)
        self._square += self._share * (tokens * tokens - self._square)


class Controller:
    """A policy. Its clock is the sum of the steps' seconds; `clock` only dates what it tells."""

    def __init__(
        self, k_max: int, *, catch_up_tokens: int = DrafterConfig.catch_up_tokens,
        objective: Objective | None = None, tuning: Tuning | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.k_max, self._catch_up_tokens, self._clock = k_max, catch_up_tokens, clock
        self._tuning, self._objective = tuning or Tuning(), objective or Objective()
        self._k = self._switches = self._steps = 0
        self._missed = 0.0  # seconds that drafts would have saved since they began to promise more
        self._unpaid = 0.0  # what the drafter had to catch up with at that time, in seconds
        self._probe: Probe | None = None
        self._allowance = 0.0  # tokens that trials may lose now
        self._probes = dict.fromkeys((DRAFT, PLAIN, DEEPER, SHALLOWER), 0)
        self._lost_s = self._lost_tokens = self._busy_s = 0.0
        self._load = Load(0)
        self.begin_with(())

    def begin_with(self, cells: Iterable[Cell]) -> None:
        """Take measured costs for granted until steps say otherwise, and forget all steps so far:
        their prompts were nobody's."""
        self.costs = CostTable(self.k_max, self._tuning, self._clock)
        if known := [cell for cell in cells if cell.k <= self.k_max]:
            self.costs.load(known)
        self.acceptance, self._totals = Acceptance(self.k_max, self._tuning), Totals(self.k_max)
        self._prompt, self._reading = PerTokenCost(self._tuning), PerTokenCost(self._tuning)
        self._prompts = self._outputs = 0.0  # tokens of late
        self._gap = 0.0  # tokens of a request that the drafter has not seen
        self._plain_s = math.inf  # since drafts were made or verified
        self._estimate: Estimate | None = None

    def steer(
        self, *, objective: str | None = None, k: int | None = None, tpot_s: float | None = None
    ) -> None:
        """Change the objective, or its K or target; raises ObjectiveError."""
        adapted = self._objective.adapts
        self._objective = self._objective.changed(self.k_max, objective, k, tpot_s)
        # Whoever turns drafts on is not made to wait until they have paid for themselves.
        self._missed = math.inf if self._objective.adapts and not adapted else 0.0
        self._estimate = self._probe = None

    @property
    def most(self) -> int:
        """K where it is pinned; else any may be next."""
        return self.k_max if self._objective.adapts else self._objective.k or 0

    @property
    def patience(self) -> int:
        """Steps that may be observed at once: each while a trial waits for its own."""
        return 1 if self._probe is not None else self._lasts()

    def choose(self, load: Load) -> int:
        """K of the drafter pass at the end of the step that is being laid out."""
        self._load = load
        if not self._objective.adapts:
            self._k = self.most
            return self._k
        if load.requests == 0 or not self.costs.measured:
            return self._k
        probe = self._probe
        if probe is not None and load.requests > 2 * probe.requests:  # a burst
            probe = self._probe = None
        if probe is None or probe.to_choose == 0:
            before, estimate = self._estimate, self._estimated(load)
            self._switch(estimate)
            if probe is None and estimate is not before:
                probe = self._probe = self._next_probe(estimate)
        if probe is not None and probe.to_choose > 0:
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
            if self._allowance > 0.0:
                self._allowance *= math.exp(-step.seconds / tuning.probe_saved_s)
            self._allowance += tuning.probe_share * step.tokens
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
        load, costs = step.load, self.costs
        reading = self._prompt.seconds * load.prefill_tokens
        reading += self._reading.seconds * load.prefill_tokens * (step.k > 0)
        asked, verified = load.drafts(step.k), load.draft_tokens
        unseen = load.prefill_tokens + load.drafts(1) * self._gap
        if costs.measured and (load.prefill_tokens or (step.k and not verified)):
            more = step.seconds - self._seconds(load, self._verified(load))
            share = step.draft_seconds / step.seconds if load.prefill_tokens else 1.0
            if load.prefill_tokens:
                self._prompt.observe(load.prefill_tokens, (1.0 - share) * more)
            if step.k and unseen:
                self._reading.observe(unseen, share * more)
            if load.prefill_tokens and not reading:
                return
        settled = asked > 0 or self._plain_s >= self._tuning.settling_s
        if settled and abs(verified - asked) <= STEADY * asked and reading < step.seconds:
            k = min(self.k_max, max(1, round(asked / load.requests))) if asked else 0
            noise = (reading / step.seconds) ** 2
            costs.observe(load.requests, k, step.seconds - reading, noise)

    def _charge(self, probe: Probe, step: Step) -> None:
        """Count what a trial loses, up to the step that verifies its last drafts."""
        load = step.load
        probe.seen = probe.seen or step.k == probe.k
        if probe.seen:
            reading = (self._prompt.seconds + self._reading.seconds) * load.prefill_tokens
            made = self._tokens(load)[self._verified(load)]
            lost = max(0.0, step.seconds - reading) - made / probe.rate
            self._lost_s += lost
            self._lost_tokens += lost * probe.rate
            self._allowance -= lost * probe.rate
        if probe.to_choose == 0 and (step.k != probe.k or probe.k == self._k):
            self._probe = None

    def _estimated(self, load: Load) -> Estimate:
        estimate = self._estimate
        if (
            estimate is None
            or self._steps - estimate.steps >= self._lasts()
            or estimate.load.requests != load.requests
            or estimate.load.reach != load.reach
        ):
            estimate = self._estimate = self._appraise(load)
        return estimate

    def _lasts(self) -> int:
        """Steps that an estimate is good for: few while the K in force is hardly known."""
        known, _ = self.costs.evidence(max(1, self._load.requests), self._k)
        return self._tuning.fresh_steps if known >= self._tuning.fresh_steps else 2

    def _appraise(self, load: Load) -> Estimate:
        row, variances = self.costs.row(load.requests)
        seconds = [self._seconds(load, k, row) for k in range(self.k_max + 1)]
        tokens = self._tokens(load)
        # A drafter that drafts reads the prompts too, an output token's share with each.
        share = self._prompts / self._outputs if self._outputs else 0.0
        entering = share * min(self._reading.seconds, self._reading_price())
        goodput = [
            n / (s + (k > 0) * entering * n)
            for k, (n, s) in enumerate(zip(tokens, seconds, strict=True))
        ]
        values = goodput
        if self._objective.name == LATENCY:
            prompts = load.prefill_tokens * self._prompt.seconds
            per_token = [
                load.requests * (s + prompts) / n for n, s in zip(tokens, seconds, strict=True)
            ]
            target = self._objective.tpot_s or math.inf
            held = [v if t <= target else 0.0 for v, t in zip(values, per_token, strict=True)]
            values = held if any(held) else [1.0 / t for t in per_token]
        # A step may be as cheap as its variance allows, but no cheaper than with fewer drafts. Its
        # tokens are about geometrically distributed; trials are as many as are remembered, or few.
        optimism, memory = self._tuning.optimism, self._tuning.memory_trials
        trials = self.acceptance.trials[0] if self.k_max else memory
        spread = [1.0 - load.requests / n for n in tokens]
        doubt, low = [], 0.0
        for s, variance, each in zip(seconds, variances, spread, strict=True):
            low = max(low, s * math.exp(-optimism * math.sqrt(variance)))
            doubt.append(s / low * math.exp(optimism * math.sqrt(each / trials)))
        luck = [math.sqrt(max(0.0, each * (1.0 / trials - 1.0 / memory))) for each in spread]
        return Estimate(load, seconds, tokens, goodput, values, doubt, luck, variances, self._steps)

    def _seconds(self, load: Load, k: int, row: list[float] | None = None) -> float:
        """A steady step's at K; requests that may have fewer drafts make it one of a smaller K."""
        row = row or self.costs.row(load.requests)[0]
        if not k or not load.reach:
            return row[k]
        each = load.drafts(k) / load.requests
        low = min(int(each), self.k_max - 1)
        return row[low] + (each - low) * (row[low + 1] - row[low]) if each else row[min(k, 1)]

    def _tokens(self, load: Load) -> list[float]:
        reach = load.reach or (load.requests,) * self.k_max
        made = (n * share for n, share in zip(reach, self.acceptance.survival(), strict=True))
        return list(accumulate(made, initial=float(load.requests)))

    def _verified(self, load: Load) -> int:
        """The K whose drafts the step verifies, more or less."""
        return min(range(self.k_max + 1), key=lambda k: abs(load.drafts(k) - load.draft_tokens))

    def _catching_up(self, load: Load) -> float:
        """Seconds that the drafter reads what it has not seen, if it is switched on now."""
        unseen = load.drafts(1) * self._gap + load.prefill_tokens
        return self._reading_price() * unseen

    def _reading_price(self) -> float:
        """Of a token that the drafter reads: no more than the target's, which is always fresh."""
        reading, prompt = self._reading.seconds, self._prompt.seconds
        return min(reading, prompt) if reading and prompt else reading or prompt

    def _switch(self, estimate: Estimate) -> None:
        values = estimate.values
        best = max(range(len(values)), key=values.__getitem__)
        wanted = (1.0 + self._tuning.hysteresis) * values[self._k]
        if best == 0 and self._k:  # bad luck at first is not the end: at K = 0 little is learned
            wanted *= math.exp(estimate.luck[self._k])
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

    def _next_probe(self, estimate: Estimate) -> Probe | None:
        """The K that may be better than the one in force, all doubt in its favour; or K = 0 where
        it is known less well than a trial tells, for what drafts save is counted from it."""
        load, values, doubt, tuning = estimate.load, estimate.values, estimate.doubt, self._tuning
        others = [k for k in range(self.k_max + 1) if k != self._k and (load.drafts(k) or not k)]
        k = max(others, key=lambda k: values[k] * doubt[k], default=self._k)
        if self._k and estimate.variances[0] > tuning.step_noise / tuning.probe_steps:
            k = 0
        elif k == self._k or values[k] * doubt[k] <= values[self._k]:
            return None
        rate = estimate.goodput[self._k]
        # Fewer drafts never take longer: an estimate that is too high must not forbid the trial
        # that would correct it.
        seconds = min(estimate.seconds[k], estimate.seconds[max(k, self._k)])
        if k:
            seconds = max(seconds / doubt[k], min(estimate.seconds[0], seconds))
        likely = tuning.probe_steps + (1.0 if k else tuning.settling_s / seconds)
        lost = max(0.0, likely * (seconds - estimate.tokens[k] / rate))
        if self._k == 0:
            lost += self._catching_up(load)
        if self._allowance < lost * rate:
            return None
        kind = PLAIN if not k else DRAFT if not self._k else DEEPER if k > self._k else SHALLOWER
        self._probes[kind] += 1
        return Probe(k, load.requests, rate, tuning.probe_steps + (k > 0))

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data for JSON: what it believes, and what that is worth."""
        beliefs, acceptance = self._beliefs(), self.acceptance
        rates = acceptance.conditional(), acceptance.survival(), acceptance.trials
        return {
            "objective": self._objective.name,
            "k": self._k,
            "k_max": self.k_max,
            "tpot_s": self._objective.tpot_s,
            "why": why(self._objective, self._k, beliefs, waits=self._missed > 0.0),
            "requests": self._load.requests,
            "waiting": self._load.waiting,
            "switches": self._switches,
            "acceptance": acceptance_rows(*rates),
            "costs": cost_rows(beliefs),
            "probes": dict(self._probes),
            "probe_back_off_s": {},
            "probe_seconds": self._lost_s,
            "probe_tokens": self._lost_tokens,
            "busy_seconds": self._busy_s,
            "totals": self._totals.snapshot(),
        }

    def _beliefs(self) -> Beliefs | None:
        if not self.costs.measured:
            return None
        load = self._load._replace(prefill_tokens=0) if self._load.requests else Load(1)
        found = self._appraise(load)
        told = [self.costs.evidence(load.requests, k) for k in range(self.k_max + 1)]
        steps, ages = zip(*told, strict=True)
        return Beliefs(load.requests, found.seconds, found.tokens, found.goodput, steps, ages)
