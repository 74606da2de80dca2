"""Adaptive K: at each step the K, 0 included, of the highest value for the objective."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from drafters.config import GRAMMAR, HEAD, LOOKUP, SOURCES, DrafterConfig
from drafters.control.acceptance import Acceptance
from drafters.control.cost_table import Cell, CostTable, bucket_of
from drafters.control.learning import StepLearner
from drafters.control.objective import Objective
from drafters.control.policy import Load, Step
from drafters.control.predictions import Predictions, Predictor
from drafters.control.probes import (
    Probe,
    ProbeBudget,
    k_to_probe,
    probe_loss_seconds,
    steps_of_probe,
)
from drafters.control.read_costs import ReadCosts
from drafters.control.report import Totals, acceptance_rows, cost_rows
from drafters.control.sources.draft_plan import DraftPlan
from drafters.control.sources.planner import SourcePlanner
from drafters.control.traffic import Traffic
from drafters.control.tuning import Tuning


@dataclass(slots=True)
class LeavingZero:
    """What staying at K = 0 has lost so far, and what leaving it costs: the drafter's catch-up."""

    forgone_seconds: float = 0.0  # that the best K > 0 would have saved since it became better
    catch_up_seconds: float = math.inf  # of the drafter: the least estimate since then
    is_free: bool = False  # leave at once: an operator has just switched drafts on


class Controller:
    """The policy of adaptive K. It reads no clock: time is the seconds of the steps it observes."""

    def __init__(
        self,
        k_max: int,
        *,
        ks: Sequence[int] | None = None,
        catch_up_tokens: int = DrafterConfig.catch_up_tokens,
        lookup_tokens: int = 0,
        span_tokens: int = 0,
        drafter: str = HEAD,
        objective: Objective | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """`ks` are the K that may be chosen, rising from 0 to `k_max`: by default all. A fixed K
        that is not among them becomes the next smaller one. `lookup_tokens` and `span_tokens` are
        the most draft tokens of a lookup and of a grammar's forced span, 0 for none. `drafter` is
        the source whose K is chosen: the head, or vLLM's own lookup on an engine without a head.
        Raises ValueError for other `ks`, or if `drafter` is also one of the sources beside it."""
        self.k_max = k_max
        self.ks = tuple(range(k_max + 1)) if ks is None else tuple(ks)
        if self.ks[:1] != (0,) or self.ks[-1] != k_max or list(self.ks) != sorted(set(self.ks)):
            raise ValueError(f"ks must rise from 0 to {k_max}, not {self.ks}")
        others = {LOOKUP: lookup_tokens, GRAMMAR: span_tokens}
        if others.get(drafter):
            raise ValueError(f"{drafter} cannot be beside itself: {others[drafter]} draft tokens")
        self._catch_up_tokens = catch_up_tokens  # per request, that the drafter reads at most
        self._lookup_tokens = lookup_tokens
        self._span_tokens = span_tokens
        self._drafter = drafter
        most = {**others, drafter: k_max}
        self.sources = tuple(source for source in SOURCES if most.get(source))
        self._tuning = tuning or Tuning()
        self._objective = objective or Objective()
        self._k = 0  # in force
        self._switches = 0
        self._chosen = 0  # steps that `choose` was called for
        self._steps = 0  # of these the observed ones
        self._busy_s = 0.0  # seconds of all steps
        self._load = Load(0)  # the latest
        self._bucket = -1  # of the latest batch (`bucket_of`); none yet
        self._batch_steps = 0  # since the batch last changed to another bucket
        self._probes = ProbeBudget(self._tuning)
        self.load_calibration(())

    def load_calibration(self, cells: Iterable[Cell]) -> None:
        """Start again from measured costs. What was learnt and counted in `totals` is dropped, as
        no user sent those steps. Cells of a K that is not in `ks` are ignored."""
        self.costs = CostTable(self.ks, self._tuning)
        cells = list(cells)
        self.costs.load(cell for cell in cells if cell.k in self.ks)
        self.acceptance = Acceptance(self.k_max, self._tuning)
        self._read_costs = ReadCosts(self._tuning)
        self._traffic = Traffic(self._catch_up_tokens, self._tuning)
        self._predictor = Predictor(
            self.ks, self.costs, self.acceptance, self._read_costs, self._traffic, self._tuning
        )
        self._planner = SourcePlanner(
            self.k_max,
            self._lookup_tokens,
            self._span_tokens,
            self.acceptance,
            self._read_costs,
            self._tuning,
        )
        self._planner.load_calibration(cells)
        self._learner = StepLearner(
            self._predictor, self.costs, self._read_costs, self._traffic, self._planner
        )
        self._totals = Totals(self.k_max, self._drafter)
        self._apply_objective()

    def set_objective(self, objective: Objective) -> None:
        """Change the objective; raises ObjectiveError where the engine does not allow it."""
        objective.validated_for(self.k_max, self.sources)
        drafted = self.k_limit > 0
        self._objective = objective
        self._apply_objective()
        # An operator who turns drafts on need not wait until they have paid for the catch-up.
        self._leaving_zero.is_free = self._uses(self._drafter) and not drafted

    def _apply_objective(self) -> None:
        """Put a fixed K in force, let the sources of the objective draft, and forget the choice
        that is under way."""
        if not self._objective.adapts or not self._uses(self._drafter):
            self._k = self.k_limit
        self._planner.use(filter(self._uses, SOURCES))
        self._predictions: Predictions | None = None
        self._probe: Probe | None = None
        self._leaving_zero = LeavingZero()

    def head_changed(self) -> None:
        """Keep the rates of the head before, with the weight of `swapped_trials` draft tokens, so
        that those of the new one soon outweigh them."""
        self.acceptance.limit_trials(self._tuning.swapped_trials)
        self._predictions = None

    @property
    def k_limit(self) -> int:
        """The largest K that may be next: a fixed K itself, if CUDA graphs have its steps, and 0 if
        the source whose K is chosen may not draft."""
        if not self._uses(self._drafter):
            return 0
        if self._objective.adapts:
            return self.k_max
        return self.ks[bisect_right(self.ks, self._objective.k or 0) - 1]

    def _uses(self, source: str) -> bool:
        """Whether a source may draft."""
        if not self._objective.adapts:
            return source == self._drafter
        return source in (self._objective.sources or self.sources)

    @property
    def max_unobserved_steps(self) -> int:
        """How many finished steps may be held back and observed together: 1 while a probe runs."""
        return 1 if self._probe is not None else self._prediction_steps()

    # The choice

    def choose(self, load: Load) -> int:
        """K, 0 to `k_limit`, of the drafter pass at the end of the step that is being scheduled.

        Earlier steps may not be observed yet: a probe ends once its last step is observed.
        """
        self._note_load(load)
        self._chosen += 1
        if not (self._objective.adapts and load.requests and self.costs.measured):
            return self._k
        if self._probe is None or self._probe.steps_to_choose == 0:
            self._decide(load)
        probe = self._probe
        if probe is None or probe.steps_to_choose == 0:
            return self._k
        # Plain steps count once they are settled; until then a probe of K = 0 goes on.
        if probe.k or self._traffic.is_settled:
            probe.steps_to_choose -= 1
        probe.steps_to_charge += 1
        return probe.k

    def plan(self) -> DraftPlan | None:
        """What each source is worth at the end of the step of the last `choose`, at the K in force.
        None where the head alone drafts, as in a probe, whose steps have to show what K is worth.
        """
        if self._predictions is None or self._probe is not None or not self._load.requests:
            return None
        return self._planner.plan(self._load, self._k, self._predictions)

    def _note_load(self, load: Load) -> None:
        self._load = load
        if not load.requests:  # it only reads prompts, and belongs to no batch
            return
        bucket = bucket_of(load.requests)
        self._batch_steps = self._batch_steps + 1 if bucket == self._bucket else 0
        self._bucket = bucket

    def _decide(self, load: Load) -> None:
        """Put the best K in force, and begin a probe if new predictions ask for one."""
        if self._predictions is not None and not self._are_stale(self._predictions, load):
            self._switch_if_better(self._predictions)
            return
        self._predictions = self._predict(load)
        self._switch_if_better(self._predictions)
        if self._probe is None:
            self._begin_probe(self._predictions)

    def _prediction_steps(self) -> int:
        """Steps for which predictions hold: few while the batch or its K is new."""
        tuning = self._tuning
        measured = self._steps_measured(self._load, self._k) if self._load.requests else 0
        if min(measured, self._batch_steps) < tuning.prediction_steps:
            return tuning.unsettled_prediction_steps
        return tuning.prediction_steps

    def _are_stale(self, predictions: Predictions, load: Load) -> bool:
        old = predictions.load
        return (
            old.requests != load.requests
            or old.requests_by_draft_limit != load.requests_by_draft_limit
            or self._steps - predictions.step >= self._prediction_steps()
        )

    def _switch_if_better(self, predictions: Predictions) -> None:
        """Put the best K in force if its value is higher by the hysteresis. K = 0 is left only once
        that pays."""
        best = predictions.best if self._uses(self._drafter) else predictions.by_k[0]
        current = predictions.by_k[self._k]
        if best.value <= (1.0 + self._tuning.hysteresis) * current.value:
            self._leaving_zero = LeavingZero()
            return
        if self._k == 0 and not self._pays_to_leave_zero(predictions):
            return
        self._k = best.k
        self._switches += 1
        self._leaving_zero = LeavingZero()

    def _pays_to_leave_zero(self, predictions: Predictions) -> bool:
        """Count what a step at K = 0 loses, and return whether drafts would by now have saved as
        many seconds as the drafter needs to catch up.

        To wait until the loss equals the price costs at most twice what it would to know in advance
        how long the load will last (the ski-rental rule: Karlin et al., 1988).
        """
        account = self._leaving_zero
        if account.is_free:
            return True
        # The least estimate holds: tokens that came since the best K > 0 became better do not
        # raise it, and a probe may have read some of the others.
        now_s = self._catch_up_seconds(predictions.load)
        account.catch_up_seconds = min(account.catch_up_seconds, now_s)
        plain = predictions.by_k[0]
        saving = 1.0 - plain.value / predictions.best.value
        account.forgone_seconds += plain.seconds * saving
        return account.forgone_seconds >= account.catch_up_seconds

    def _catch_up_seconds(self, load: Load) -> float:
        """Seconds in which the drafter reads what it has not, if it is switched on now."""
        unread = load.requests_drafted_at(0) * self._traffic.unread_tokens_per_request
        return self._read_costs.drafter_seconds_per_token * (unread + load.prefill_tokens)

    def _predict(self, load: Load) -> Predictions:
        return self._predictor.predict(load, self._objective, self._steps)

    # Probes

    def _begin_probe(self, predictions: Predictions) -> None:
        """Begin a probe if another K may be better, the budget allows the expected loss, and the
        batch has already lasted as many steps as the probe will take.

        At K = 0 the age of the batch does not matter: to wait only adds to the catch-up.
        """
        k = k_to_probe(
            predictions,
            self._k,
            self._tuning,
            step_noise=self.costs.noise,
            drafter_may_draft=self._uses(self._drafter),
            others_may_draft=self._planner.others_draft,
        )
        if k is None:
            return
        steps = steps_of_probe(predictions, k, self._tuning)
        if self._k and self._batch_steps < steps:
            return
        rate = self._planner.tokens_per_second(predictions, self._k)
        catch_up_s = self._catch_up_seconds(predictions.load) if k and self._k == 0 else 0.0
        lost_seconds = probe_loss_seconds(predictions, k, rate, catch_up_s, self._tuning)
        if self._probes.allows(k, lost_seconds * rate, self._busy_s):
            steps_before = self._chosen - 1 - self._steps
            self._probe = self._probes.begin(k, self._k, self._busy_s, steps_before)

    def _charge_and_end_probe(self, probe: Probe, step: Step) -> None:
        """Charge a step of a probe with what the K in force would have made in the same time. Each
        step counts at the rate of its own batch."""
        load = step.load
        predictions = self._predict(load)
        rate = self._planner.tokens_per_second(predictions, self._k)
        expected = predictions.by_k[self._k_with_these_drafts(load)]
        seconds = min(step.seconds, self._longest_seconds(predictions, step))
        # Subtract the prompt reading that the K in force would also do.
        seconds -= self._read_costs.prompt_seconds(load, self._k > 0)
        # Expected tokens vary less than counted ones, but leave out lookups and spans.
        made = step.tokens if step.others else expected.tokens
        self._probes.charge(probe, seconds * rate - made)
        if probe.has_ended:
            self._probes.end(probe, rate)
            self._probe = None

    def _longest_seconds(self, predictions: Predictions, step: Step) -> float:
        """The most seconds that a step of a probe is charged as. The probe did not cause a pause of
        the machine, and to work off one of 30 s would take more than an hour."""
        ks = self._k_with_these_drafts(step.load), self._predictor.captured_k(step.k)
        seconds = max(
            self.costs.longest_seconds(predictions.by_k[k].seconds, predictions.by_k[k].variance)
            for k in ks
        )
        seconds += self._read_costs.prompt_seconds(step.load, drafting=False)
        if step.k:
            seconds += self._catch_up_seconds(step.load)
        return seconds

    def _k_with_these_drafts(self, load: Load) -> int:
        """The K at which a batch with these limits has the draft tokens that this load verifies,
        for its expected tokens. With limits K = 5 can verify as few as K = 2: its expected tokens
        are those of 5, its seconds those of 2 (`StepLearner._k_of_verification_cost`)."""
        if load.padded:
            return self._predictor.captured_k(load.mean_k(load.draft_tokens))
        enough = (k for k in self.ks if load.draft_tokens_at(k) >= load.draft_tokens)
        return next(enough, self.k_max)

    # Learning

    def observe(self, step: Step) -> None:
        """Learn from a step that has run. Steps come in the order of `choose`, which may have been
        called for later ones too."""
        load = step.load
        self._steps += 1
        self._busy_s += step.seconds
        if self._objective.adapts:
            self._probes.earn(step)
        self.acceptance.observe(load.requests, step.drafted, step.accepted)
        self._planner.observe_comparisons(step)
        self._traffic.average(step)
        if load.requests:
            self._learner.observe(step)
        if self._probe is not None and self._probe.steps_before:
            self._probe.steps_before -= 1
        elif self._probe is not None and load.requests:
            self._charge_and_end_probe(self._probe, step)
        self._traffic.update_backlog(step)
        self._totals.add(
            step, self._learner.decode_seconds(step), self._learner.plain_seconds(step)
        )

    # The state

    def _steps_measured(self, load: Load, k: int) -> int:
        """Steps behind the cost of a step of this load at K."""
        return self.costs.steps(load.requests, self._predictor.captured_k(load.cost_k(k)))

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data for JSON: what it believes, and what that is worth."""
        load = self._load if self._load.requests else Load(1)
        costs = []
        if self.costs.measured:
            predictions = self._predict(load).by_k.values()
            costs = cost_rows(predictions, partial(self._steps_measured, load))
        return {
            "objective": self._objective.objective,
            "k": self._k,
            "batch_k": 0 if self._load.drafts_off else self._k,  # 0: nobody may have drafts
            "k_max": self.k_max,
            "tpot_s": self._objective.tpot_s,
            "batch": self._load.requests,  # that K was chosen for; at 0 the costs are of 1 request
            "waits_for_catch_up": self._leaving_zero.forgone_seconds > 0.0,
            "switches": self._switches,
            "available_sources": list(self.sources),
            "sources": list(self._objective.sources or self.sources),
            "acceptance": acceptance_rows(self.acceptance),
            "lookups": self._planner.lookup_rows(),
            "spans": self._planner.span_row(),
            "costs": costs,
            "probes": dict(self._probes.count_by_kind),
            "probe_seconds": self._probes.lost_seconds,
            "probe_tokens": self._probes.lost_tokens,
            "busy_seconds": self._busy_s,
            "totals": self._totals.snapshot(),
        }
