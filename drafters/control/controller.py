"""Adaptive K: as many drafts as make the most of the next second, none included."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from drafters.control.acceptance import Acceptance
from drafters.control.calibration import Calibration
from drafters.control.fixed import checked_k
from drafters.control.policy import Load, Step
from drafters.control.price import Price
from drafters.control.probing import DEEPER, DRAFT, PLAIN, SHALLOWER, Probe, Probing
from drafters.control.table import STEADY, CostTable
from drafters.control.totals import Totals

THROUGHPUT, LATENCY, FIXED, OFF = "throughput", "latency", "fixed", "off"
OBJECTIVES = (THROUGHPUT, LATENCY, FIXED, OFF)

HYSTERESIS = 0.005  # another K must promise this much more
CATCH_UP_LIMIT = 512  # skipped tokens per request beyond which the drafter's work does not grow
_TELLING = 64  # skipped tokens from which on the time to catch up shows in a step
_RECENT = 256  # steps from which the share of prompts in all tokens is taken
_FRESH = 8  # steps for which an estimate at an unchanged batch is good
_NEW = 2  # at a K that was just tried: one step verifies the drafts before it, one its own
_NEAR_STEPS = 3  # of a probe while drafting: the first still verifies the drafts before it
_DRAFT_TRIALS = 16  # of the first position that a probe from K = 0 aims at
_DEEPER_BY = 2


@dataclass(slots=True)
class _Estimate:
    """What each K promises at one load: [k_max + 1] each."""

    requests: int
    seconds: list[float]  # of a steady step
    rates: list[float]  # tokens per second
    values: list[float]  # what the objective maximises
    steps: int  # observed when it was made


class Controller:
    """The policy of `aerie serve`. Its clock is the sum of the steps' seconds."""

    def __init__(
        self,
        k_max: int,
        *,
        rng: random.Random,
        calibration: Calibration | None = None,
        objective: str = THROUGHPUT,
        k: int | None = None,
        tpot_s: float | None = None,
    ) -> None:
        self._k_max = k_max
        self._costs = CostTable(k_max)
        self._acceptance = Acceptance(k_max)
        self._probing = Probing(rng)
        self._prefill, self._catch_up = Price(), Price()
        self._entering = Price()  # of prompts into the drafter
        self._prompts = self._outputs = 0.0  # recent tokens
        self._estimate: _Estimate | None = None
        self._k = 0  # chosen for its own sake, not by a probe
        self._gap = 0.0  # tokens per request that the drafter has not seen
        self._missed = 0.0  # seconds that drafts would have saved since they began to promise more
        self._gap_then = 0.0  # and the gap at that time: what waiting adds is no reason to wait
        self._steps = self._switches = 0
        self._totals = Totals(k_max)
        self._load = Load(0)
        self._objective, self._pinned, self._tpot_s = OFF, 0, math.inf
        self.steer(objective=objective, k=k, tpot_s=tpot_s)
        if calibration is not None:
            self.begin_with(calibration)

    @property
    def k_max(self) -> int:
        """The most tokens that may be drafted."""
        return self._k_max

    @property
    def _adapts(self) -> bool:
        return self._objective in (THROUGHPUT, LATENCY)

    def begin_with(self, calibration: Calibration) -> None:
        """Take measured costs for granted until steps say otherwise."""
        self._costs.load(cell for cell in calibration.cells if cell.k <= self._k_max)
        self._estimate = None

    def steer(
        self, *, objective: str | None = None, k: int | None = None, tpot_s: float | None = None
    ) -> None:
        """Change the objective, or its K or target; ValueError names the field at fault."""
        chosen = self._objective if objective is None else objective
        if chosen not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, not {objective!r}")
        if k is not None and chosen != FIXED:
            raise ValueError(f"k is for the objective {FIXED!r}, not {chosen!r}")
        if tpot_s is not None and chosen != LATENCY:
            raise ValueError(f"tpot_s is for the objective {LATENCY!r}, not {chosen!r}")
        if chosen == FIXED and k is None and self._objective != FIXED:
            raise ValueError(f"k is needed for the objective {FIXED!r}")
        if chosen == LATENCY and tpot_s is None and self._objective != LATENCY:
            raise ValueError(f"tpot_s is needed for the objective {LATENCY!r}")
        if tpot_s is not None and not 0.0 < tpot_s < math.inf:
            raise ValueError(f"tpot_s must be a positive number of seconds, not {tpot_s!r}")
        if k is not None:
            self._pinned = checked_k(k, self._k_max)
        if tpot_s is not None:
            self._tpot_s = tpot_s
        self._objective = chosen
        self._estimate, self._probing.active = None, None

    def choose(self, load: Load) -> int:
        """K of the drafter pass at the end of the step that is being laid out."""
        self._load = load
        if not self._adapts:
            self._k = self._pinned if self._objective == FIXED else 0
            return self._k
        if not self._costs.measured or load.requests == 0:
            return self._k
        probe = self._probing.active
        if probe is None:
            estimate = self._estimated(load)
            self._switch(load, estimate)
            probe = self._start_probe(load, estimate)
        elif load.requests > 2 * probe.requests:  # a burst: what was affordable no longer is
            probe.to_choose = 0
            self._switch(load, self._estimated(load))
        if probe is not None and probe.to_choose > 0:
            probe.to_choose -= 1
            return probe.k
        return self._k

    def observe(self, step: Step) -> None:
        """Learn from a step that has run."""
        load = step.load
        self._steps += 1
        # A fixed K saves nothing up for the time after it.
        self._probing.earn(step.seconds, step.tokens if self._adapts else 0)
        self._acceptance.observe(step.drafted, step.accepted, step.runs)
        self._prompts += (load.prefill_tokens - self._prompts) / _RECENT
        self._outputs += (step.tokens - self._outputs) / _RECENT
        if load.requests:
            self._learn(step)
        self._totals.add(step, self.without_drafts(step))

    def _learn(self, step: Step) -> None:
        load = step.load
        self._learn_cost(step)
        unseen = self._gap + (step.tokens + load.prefill_tokens) / load.requests
        longest = min(CATCH_UP_LIMIT, load.context_tokens / load.requests + 1.0)
        self._gap = min(longest, unseen) if step.k == 0 else 0.0
        if self._probing.active is None:
            return
        # A probe is charged neither with prompts nor with bad luck: its tokens are the expected.
        made = self._acceptance.tokens()[min(self._k_max, load.draft_tokens // load.requests)]
        # What it costs more to have the drafter read prompts is the probe's.
        seconds = step.seconds - self._reading(load.prefill_tokens, self._k)
        probe = self._probing.charge(step.k, seconds, made * load.requests)
        if probe is not None:
            self._probing.settle(probe, self._appraise(Load(probe.requests)).rates[probe.k])

    def without_drafts(self, step: Step) -> float:
        """Seconds that the step's tokens would have taken at K = 0, its prompts read as well."""
        load = step.load
        drafting = step.k > 0 or load.draft_tokens > 0
        if not drafting or load.requests == 0 or not self._costs.measured:
            return step.seconds
        plain = self._costs.seconds(load.requests, 0, load.context_tokens)
        return plain * step.tokens / load.requests + self._reading(load.prefill_tokens, 0)

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data for JSON: what it believes, and what that is worth."""
        load = self._load
        state: dict[str, Any] = {
            "objective": self._objective,
            "k": self._k,
            "k_max": self._k_max,
            "tpot_s": self._tpot_s if self._objective == LATENCY else None,
            "requests": load.requests,
            "waiting": load.waiting,
            "switches": self._switches,
            "acceptance": [],
            "costs": [],
            "probes": dict(self._probing.probes),
            "probe_back_off_s": self._probing.back_off,
            "probe_seconds": self._probing.lost_seconds,
            "probe_tokens": self._probing.lost_tokens,
            "decode_seconds": self._probing.decode_seconds,
            "totals": self._totals.snapshot(),
        }
        conditional, survival = self._acceptance.conditional(), self._acceptance.survival()
        tokens = self._acceptance.tokens()
        for i, trials in enumerate(self._acceptance.trials):
            state["acceptance"].append(
                {
                    "position": i + 1,
                    "conditional": conditional[i],
                    "cumulative": survival[i],
                    "trials": trials,
                }
            )
        if self._costs.measured:
            requests = max(1, load.requests)
            for k, seconds in enumerate(self._costs.row(requests, load.context_tokens)):
                state["costs"].append(
                    {
                        "k": k,
                        "step_seconds": seconds,
                        "tokens_per_second": requests * tokens[k] / seconds,
                        "steps_measured": self._costs.weight(requests, k),
                    }
                )
        return state

    def _learn_cost(self, step: Step) -> None:
        load, requests = step.load, step.load.requests
        asked = requests * step.k
        if load.prefill_tokens:
            if self._costs.measured:
                k = min(self._k_max, round(load.draft_tokens / requests))
                expected = self._costs.seconds(requests, k, load.context_tokens)
                # The drafter had about the same share of it as of the whole step.
                share, more = step.draft_seconds / step.seconds, step.seconds - expected
                self._prefill.observe(load.prefill_tokens, (1.0 - share) * more)
                if step.k:
                    self._entering.observe(load.prefill_tokens, share * more)
        elif abs(load.draft_tokens - asked) <= STEADY * asked:
            self._costs.observe(requests, step.k, load.context_tokens, step.seconds)
        elif load.draft_tokens == 0 and requests * self._gap >= _TELLING and self._costs.measured:
            # Verifies nothing yet, so the catching up looks cheaper by what verifying costs.
            steady = self._costs.seconds(requests, step.k, load.context_tokens)
            self._catch_up.observe(requests * self._gap, step.seconds - steady)

    def _reading(self, prompts: int, k: int) -> float:
        """Seconds for so many prompt tokens, of the drafter as well unless `k` is 0."""
        return prompts * (self._prefill.seconds + (k > 0) * self._entering.seconds)

    def _estimated(self, load: Load) -> _Estimate:
        estimate = self._estimate
        if (
            estimate is None
            or estimate.requests != load.requests
            or self._steps - estimate.steps >= self._lasts(load)
            or load.prefill_tokens
        ):
            estimate = self._estimate = self._appraise(load)
        return estimate

    def _lasts(self, load: Load) -> int:
        """Steps that an estimate is good for: few while the present K is hardly known."""
        known = self._costs.weight(load.requests, self._k) >= _FRESH
        return _FRESH if known else _NEW

    def _appraise(self, load: Load) -> _Estimate:
        requests, seconds = load.requests, self._costs.row(load.requests, load.context_tokens)
        if load.prefill_tokens and load.waiting:
            # More prompts follow, so drafts will be verified beside prompts. The device is busy
            # then: a draft costs what a prompt's token costs, at least.
            price = requests * self._prefill.seconds
            seconds = [max(cost, seconds[0] + price * k) for k, cost in enumerate(seconds)]
        tokens = self._acceptance.tokens()
        rates = [requests * made / cost for made, cost in zip(tokens, seconds, strict=True)]
        # A drafter that drafts reads the prompts too, an output token's share with each.
        share = self._prompts / self._outputs if self._outputs else 0.0
        entering = share * self._entering.seconds
        values = [rates[0], *(1.0 / (1.0 / rate + entering) for rate in rates[1:])]
        if self._objective == LATENCY:
            # At a given batch fewer seconds per token are more tokens per second, unless prompts
            # are read beside it: those the target counts, though no K can avoid them.
            reading = [self._reading(load.prefill_tokens, k) for k in range(len(seconds))]
            steps = map(sum, zip(seconds, reading, strict=True))
            tpot = [s / made for s, made in zip(steps, tokens, strict=True)]
            held = [rate if t <= self._tpot_s else 0.0 for rate, t in zip(rates, tpot, strict=True)]
            values = held if any(held) else [1.0 / t for t in tpot]
        return _Estimate(requests, seconds, rates, values, self._steps)

    def _switch(self, load: Load, estimate: _Estimate) -> None:
        values = estimate.values
        best = max(range(len(values)), key=values.__getitem__)
        if values[best] <= (1.0 + HYSTERESIS) * values[self._k]:
            self._missed = 0.0
            return
        if self._k == 0:
            # How long the load stays nobody knows. Paying once as much has been missed costs at
            # most twice what knowing it would, and nothing in a dip between two bursts.
            if not self._missed:
                self._gap_then = self._gap
            self._missed += estimate.seconds[0] * (1.0 - values[0] / values[best])
            if self._missed < self._catching_up(load, self._gap_then):
                return
        self._k, self._missed = best, 0.0
        self._switches += 1
        self._probing.renew()

    def _catching_up(self, load: Load, gap: float) -> float:
        """Seconds that the drafter's first pass takes longer if it is switched on now."""
        # Unknown: as for prompts, or at most the target's.
        price = self._catch_up.seconds or self._entering.seconds or self._prefill.seconds
        return price * load.requests * gap + self._entering.seconds * load.prefill_tokens

    def _start_probe(self, load: Load, estimate: _Estimate) -> Probe | None:
        rates, probing = estimate.rates, self._probing
        if self._k == 0:
            k = max(range(1, len(rates)), key=rates.__getitem__, default=0)
            candidates = [(DRAFT, k, 1 + math.ceil(_DRAFT_TRIALS / load.requests))]
        else:
            deeper = min(self._k + _DEEPER_BY, self._k_max)
            shallower = (self._k + 1) // 2
            candidates = [
                (PLAIN, 0, _NEAR_STEPS),
                (DEEPER, deeper, _NEAR_STEPS),
                (SHALLOWER, shallower, _NEAR_STEPS),
            ]
        for kind, k, steps in candidates:
            if k == self._k or not probing.is_due(kind):
                continue
            lost = steps * estimate.seconds[k] * (1.0 - rates[k] / rates[self._k])
            if self._k == 0:
                lost += self._catching_up(load, self._gap)
            probe = Probe(
                kind, k, load.requests, rates[self._k], rates[k], steps, to_observe=steps + 2
            )
            if probing.begin(probe, lost):
                return probe
        return None
