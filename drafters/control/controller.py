"""Adaptive K: as many drafts as make the most of the next second, none included."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drafters.config import DrafterConfig
from drafters.control.calibration import Calibration
from drafters.control.cost import Cell
from drafters.control.forecast import SETTLING_S, Forecast, Promise
from drafters.control.objective import LATENCY, OFF, THROUGHPUT, Objective
from drafters.control.policy import Load, Step
from drafters.control.probing import DEEPER, DRAFT, LONGEST_S, PLAIN, SHALLOWER, Probe, Probing
from drafters.control.report import Beliefs, acceptance_rows, cost_rows, why
from drafters.control.totals import Totals

HYSTERESIS = 0.005  # another K must promise this much more
_FRESH = 16  # steps for which an estimate at an unchanged batch is good
_NEW = 2  # at a K that was just tried: one step verifies the drafts before it, one its own
_KNOWN = 8  # steps at a K after which that is over
_NEAR_STEPS = 3  # of a probe while drafting, the first of which still verifies others' drafts
_PLAIN_STEPS = 2  # of one without drafts, once they have settled
_DRAFT_TRIALS = 16  # of the first position that a probe from K = 0 aims at
_DEEPER_BY = 2


@dataclass(slots=True)
class _Estimate:
    promise: Promise
    values: list[float]  # of each K, what the objective maximises: [k_max + 1]
    best: int  # K with the largest of them
    steps: int  # observed when it was made


class Controller:
    """The policy of `aerie serve`. Its clock is the sum of the steps' seconds."""

    def __init__(
        self,
        k_max: int,
        *,
        rng: random.Random,
        catch_up_tokens: int = DrafterConfig.catch_up_tokens,
        calibration: Calibration | None = None,
        grows: bool = False,
        objective: str = THROUGHPUT,
        k: int | None = None,
        tpot_s: float | None = None,
    ) -> None:
        self._k_max, self._catch_up_tokens, self._grows = k_max, catch_up_tokens, grows
        self._probing = Probing(rng)
        self._k = 0  # chosen for its own sake, not by a probe
        self._missed = 0.0  # seconds that drafts would have saved since they began to promise more
        self._gap_then = 0.0  # the drafter's gap at that time: waiting adds no reason to wait
        self._steps = self._switches = 0
        self._load = Load(0)
        self._objective = Objective(OFF)
        self.begin_with(calibration.cells if calibration is not None else ())
        self.steer(objective=objective, k=k, tpot_s=tpot_s)

    @property
    def k_max(self) -> int:
        """The most tokens that may be drafted."""
        return self._k_max

    @property
    def most(self) -> int:
        """K where it is pinned; else any may be next."""
        if self._adapts:
            return self._k_max
        return self._objective.k or 0

    @property
    def doubts(self) -> bool:
        """Whether the drafter may leave out drafts that it doubts itself: not where K is pinned."""
        return self._adapts

    @property
    def grows(self) -> bool:
        """Whether requests are asked for more than K while all of theirs are accepted."""
        return self._grows and self._adapts

    @property
    def patience(self) -> int:
        """Steps that may be observed one after the other once all of them have run: as many as an
        estimate is good for, and each at once while a probe waits for its own."""
        if self._probing.active is not None:
            return 1
        return self._lasts(self._load) if self._adapts else _FRESH

    @property
    def _adapts(self) -> bool:
        return self._objective.adapts

    def begin_with(self, cells: Iterable[Cell]) -> None:
        """Take measured costs for granted until steps say otherwise. Steps so far measured them:
        the acceptance of their drafts says nothing about anybody's requests, so all is forgotten.
        """
        self._forecast = Forecast(self._k_max, self._catch_up_tokens, grows=self._grows)
        self._forecast.adapts = self._adapts
        if known := [cell for cell in cells if cell.k <= self._k_max]:
            self._forecast.costs.load(known)
        self._totals = Totals(self._k_max)
        self._estimate: _Estimate | None = None

    def steer(
        self, *, objective: str | None = None, k: int | None = None, tpot_s: float | None = None
    ) -> None:
        """Change the objective, or its K or target; raises ObjectiveError."""
        adapted = self._adapts
        self._objective = self._objective.changed(self._k_max, objective, k, tpot_s)
        self._forecast.adapts = self._adapts
        # Whoever asks for the best K is not made to wait until drafts have paid for themselves.
        self._estimate, self._missed = None, math.inf if self._adapts and not adapted else 0.0
        self._probing.give_up()

    def choose(self, load: Load) -> int:
        """K of the drafter pass at the end of the step that is being laid out."""
        self._load = load
        if not self._adapts:
            self._k = self.most
            return self._k
        if not self._forecast.costs.measured or load.requests == 0:
            return self._k
        probe = self._probing.active
        if probe is None:
            before, estimate = self._estimate, self._estimated(load)
            self._switch(load, estimate)
            if estimate is not before:
                probe = self._start_probe(load, estimate.promise)
        elif load.requests > 2 * probe.load.requests:  # a burst: no longer affordable
            self._probing.give_up()
            probe = None
            self._switch(load, self._estimated(load))
        if probe is not None and probe.to_choose > 0:
            if probe.k or self._forecast.is_settled:
                probe.to_choose -= 1
            return probe.k
        return self._k

    def observe(self, step: Step) -> None:
        """Learn from a step that has run."""
        self._steps += 1
        # A fixed K saves nothing up for the time after it.
        self._probing.earn(step.seconds, step.tokens if self._adapts else 0)
        self._forecast.learn(step)
        if self._probing.active is not None and step.load.requests:
            self._charge(step)
        self._totals.add(step, self._forecast.without_drafts(step))

    def _charge(self, step: Step) -> None:
        """The probe under way, neither with bad luck (its tokens are the expected) nor with the
        prompts, but for what the drafter reads of them on its account."""
        load, forecast = step.load, self._forecast
        seconds = step.seconds - forecast.reading(load.prefill_tokens, self._k)
        made = forecast.tokens(load)[forecast.verified(load)]
        probe = self._probing.charge(step.k, seconds, made)
        if probe is not None:
            self._probing.settle(probe, forecast.promise(probe.load).rates[probe.k])

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data for JSON: what it believes, and what that is worth."""
        load, acceptance = self._load, self._forecast.acceptance
        beliefs = self._beliefs()
        rates = acceptance.conditional(), acceptance.survival(), acceptance.trials
        return {
            "objective": self._objective.name,
            "k": self._k,
            "k_max": self._k_max,
            "tpot_s": self._objective.tpot_s,
            "why": why(self._objective, self._k, beliefs, waits=self._missed > 0.0),
            "requests": load.requests,
            "waiting": load.waiting,
            "switches": self._switches,
            "acceptance": acceptance_rows(*rates),
            "costs": cost_rows(beliefs),
            "probes": dict(self._probing.probes),
            "probe_back_off_s": self._probing.back_off,
            "probe_seconds": self._probing.lost_seconds,
            "probe_tokens": self._probing.lost_tokens,
            "busy_seconds": self._probing.busy_seconds,
            "totals": self._totals.snapshot(),
        }

    def _beliefs(self) -> Beliefs | None:
        costs = self._forecast.costs
        if not costs.measured:
            return None
        load = self._load._replace(prefill_tokens=0) if self._load.requests else Load(1)
        promise, ks = self._forecast.promise(load), range(self._k_max + 1)
        return Beliefs(
            load.requests, promise.seconds, promise.tokens, promise.goodput,
            [costs.weight(load.requests, k) for k in ks],
            [costs.age_s(load.requests, k) for k in ks],
        )  # fmt: skip

    def _estimated(self, load: Load) -> _Estimate:
        estimate = self._estimate
        if (
            estimate is None
            or self._steps - estimate.steps >= self._lasts(load)
            or (then := estimate.promise.load).requests != load.requests
            or then.reach != load.reach
            or then.prefill_tokens
            or load.prefill_tokens
        ):
            estimate = self._estimate = self._appraise(load)
        return estimate

    def _lasts(self, load: Load) -> int:
        """Steps that an estimate is good for: few while the present K is hardly known."""
        known = self._forecast.costs.weight(load.requests, self._k) >= _KNOWN
        return _FRESH if known else _NEW

    def _appraise(self, load: Load) -> _Estimate:
        promise = self._forecast.promise(load)
        values = promise.goodput
        if self._objective.name == LATENCY:
            target = self._objective.tpot_s or math.inf
            # At a given batch fewer seconds per token are more tokens per second, unless prompts
            # are read beside it: `tpot_s` includes them, though no K can avoid them.
            reading = (self._forecast.reading(load.prefill_tokens, k) for k in range(len(values)))
            steps = map(sum, zip(promise.seconds, reading, strict=True))
            tpot = [load.requests * s / n for s, n in zip(steps, promise.tokens, strict=True)]
            held = [v if t <= target else 0.0 for v, t in zip(values, tpot, strict=True)]
            values = held if any(held) else [1.0 / t for t in tpot]
        best = max(range(len(values)), key=values.__getitem__)
        return _Estimate(promise, values, best, self._steps)

    def _switch(self, load: Load, estimate: _Estimate) -> None:
        values, best = estimate.values, estimate.best
        if values[best] <= (1.0 + HYSTERESIS) * values[self._k]:
            self._missed = 0.0
            return
        if self._k == 0:
            # How long the load stays nobody knows. Paying once as much has been missed costs at
            # most twice what knowing it would, and nothing in a dip between two bursts.
            if not self._missed:
                self._gap_then = self._forecast.gap
            self._missed += estimate.promise.seconds[0] * (1.0 - values[0] / values[best])
            if self._missed < self._forecast.catching_up(load, self._gap_then):
                return
        self._k, self._missed = best, 0.0
        self._switches += 1
        self._probing.renew()

    def _start_probe(self, load: Load, promise: Promise) -> Probe | None:
        rates, probing = promise.rates, self._probing
        if self._k == 0:
            k = max(range(1, len(rates)), key=rates.__getitem__, default=0)
            if load.drafts(k) == 0:
                return None
            # A few steps correct a cost that is too high, which would forbid the many that it
            # takes to know how far drafts are accepted.
            each = promise.seconds[k] - promise.tokens[k] / rates[0]
            affordable = int(0.5 * LONGEST_S / each) if each > 0.0 else _FRESH
            trials = 1 + math.ceil(_DRAFT_TRIALS / load.drafts(1))
            candidates = [(DRAFT, k, max(_NEAR_STEPS, min(trials, affordable)))]
        else:
            deeper = min(self._k + _DEEPER_BY, self._k_max)
            shallower = (self._k + 1) // 2
            candidates = [
                (PLAIN, 0, _PLAIN_STEPS),
                (DEEPER, deeper, _NEAR_STEPS),
                (SHALLOWER, shallower, _NEAR_STEPS),
            ]
        for kind, k, steps in candidates:
            if k == self._k or not probing.is_due(kind):
                continue
            # Fewer drafts never take longer: an estimate that is too high must not forbid the
            # probe that would correct it.
            seconds = min(promise.seconds[k], promise.seconds[max(k, self._k)])
            likely = steps if k else steps + SETTLING_S / seconds
            lost = likely * (seconds - promise.tokens[k] / rates[self._k])
            if self._k == 0:
                lost += self._forecast.catching_up(load, self._forecast.gap)
            probe = Probe(kind, k, promise.load, rates[self._k], rates[k], steps)
            if probing.begin(probe, lost):
                return probe
        return None
