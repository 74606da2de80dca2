"""vLLM's scheduler, which asks a policy for K at every step and reports finished steps to it."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from time import perf_counter
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from drafters.config import GRAMMAR, HEAD, LOOKUP, MAX_DEFERRED_STEPS, DrafterConfig, captured_ks
from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import FIXED, Objective
from drafters.control.policy import Span
from drafters.vllm.own_drafter import chooses_k, has_own_drafter, is_parallel
from drafters.vllm.scheduling.forced_spans import ForcedSpans
from drafters.vllm.scheduling.limits import (
    draft_limit,
    follows_counts,
    reports_steps,
    reports_tokens,
    within_budget,
)
from drafters.vllm.scheduling.request_steps import RequestSteps
from drafters.vllm.scheduling.source_counts import RequestSourceCounts
from drafters.vllm.scheduling.step_output import WorkerStepOutput, attach_plan, plan_of
from drafters.vllm.scheduling.step_recorder import StepRecorder, keeps_drafts, load_of


class DraftingScheduler(Scheduler):
    """vLLM's scheduler with a policy that chooses K, once for all ranks: the SchedulerOutput takes
    it to the workers."""

    vllm_config: Any  # a copy of vLLM's, with the K that slots are reserved for

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = DrafterConfig.read(self.vllm_config.additional_config)
        self.k_max = k_max = config.head_k(self.num_spec_tokens)
        # On V2 vLLM looks up, or nobody: the newest tokens are on the device.
        looks_up_here = not self.use_v2_model_runner
        lookup_k = config.lookup_k(self.num_spec_tokens) if looks_up_here else 0
        if self.num_spec_tokens:
            # vLLM's table from batch size to K, whose values the policy overrules. With a table,
            # vLLM does not pad a request's first decode step to the width of a CUDA graph for one
            # K, by drafts that do not exist (v1/core/sched/scheduler.py, pad_spec_decode).
            self.dynamic_sd_lookup = [k_max] * (self.max_num_running_reqs + 1)
        speculation = self.vllm_config.speculative_config
        ours = chooses_k(speculation)
        # On V1, drafts come with a step's output, and are not asked for (patches.py). On V2, they
        # stay on the device: every request gets K. Those over its limit are not scheduled, or, for
        # a batch to fit a CUDA graph, in which each request has as many tokens, scheduled and
        # rejected (v2/request_limits.py).
        self.brings_drafts = ours and not self.use_v2_model_runner
        graphs = self.vllm_config.compilation_config.cudagraph_mode
        captured = ours and self.use_v2_model_runner and graphs.has_full_cudagraphs()
        self._pads = captured
        self._ours = ours  # vLLM's own drafters know neither limits of requests nor K
        self._limits: dict[str, int] = {}  # request id -> its largest K, where below k_max
        self._least: dict[str, int] = {}  # request id -> its min_tokens, where drafts end before it
        # Token ids with which reasoning begins, where drafts must not pass its budget.
        reasoning = self.vllm_config.reasoning_config
        start = reasoning and reasoning.reasoning_start_token_ids
        self._reasoning_start: list[int] = start if start and self.brings_drafts else []
        self._budgets: dict[str, int] = {}  # request id -> its budget, where drafts may be more
        window = config.window(self.scheduler_config.max_num_batched_tokens)
        # The source of which K is chosen: the head, or vLLM's own lookup. Ours needs no K.
        drafter = LOOKUP if k_max and not has_own_drafter(speculation) else HEAD
        # vLLM's `policy` is another: by it the scheduler decides whom it preempts.
        self.k_policy = Controller(
            k_max,
            ks=captured_ks(k_max) if captured else None,
            catch_up_tokens=MAX_DEFERRED_STEPS if self.use_v2_model_runner else window,
            lookup_tokens=lookup_k,
            span_tokens=self.num_spec_tokens if self.brings_drafts else 0,
            drafter=drafter,
            # The largest K, until the gateway has seen drafts and sets the objective.
            objective=Objective(FIXED, k=k_max) if k_max else None,
        )
        # Slots behind a step that drafts need at the largest K: none for lookups.
        self._lookahead: int = self.vllm_config.num_lookahead_tokens
        self._reserved_k = k_max  # the latest choice of K: slots are reserved for so many drafts
        if ours and self.num_spec_tokens:
            # vLLM reads K from here for that, at every step.
            self.vllm_config = copy(self.vllm_config)
            self.vllm_config.speculative_config = copy(self.vllm_config.speculative_config)
        self.recorder = StepRecorder(k_max, self.num_spec_tokens, drafter)
        # Of drafts that are not the head's and are not scheduled yet: request -> source.
        self._sources: dict[str, str] = {}
        # Of the requests that asked where their tokens come from.
        self._source_counts: dict[str, RequestSourceCounts] = {}
        # Of the requests that are captured, and what the step that ends verified of each.
        self._steps: dict[str, RequestSteps] = {}
        self._verified: dict[str, tuple[int, int]] = {}
        # On V2 the newest tokens are on the device when the next step is scheduled.
        self._forced: ForcedSpans | None = None
        if self.brings_drafts:
            self._forced = ForcedSpans(self.structured_output_manager, self.num_spec_tokens)
        # Whether the model runs in this thread, so that it stands still while the policy learns.
        self._alone = current_platform.is_cpu() and issubclass(
            Executor.get_class(self.vllm_config), UniProcExecutor
        )

    def add_request(self, request: Request) -> None:
        """Add a request, and remember its limit of drafts."""
        name, params = request.request_id, request.sampling_params
        limit = draft_limit(params, self.k_max, v2=self.use_v2_model_runner)
        if self._ours and limit < self.k_max:
            self._limits[name] = limit
        if self.brings_drafts and params is not None and params.min_tokens:
            self._least[name] = params.min_tokens
        budget = None if params is None else params.thinking_token_budget
        if self._reasoning_start and budget is not None and budget < self.num_spec_tokens:
            self._budgets[name] = budget
        if reports_tokens(params):
            self._source_counts[name] = RequestSourceCounts()
        elif reports_steps(params):
            self._steps[name] = RequestSteps()
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, with room in the KV cache for its drafts."""
        begun = perf_counter()
        if self._ours:
            self.num_lookahead_tokens = min(self.k_policy.k_limit, self._lookahead)
            self.vllm_config.speculative_config.num_speculative_tokens = max(1, self._reserved_k)
        scheduled = super().schedule(throttle_prefills)
        if scheduled.total_num_scheduled_tokens:
            scheduled.num_invalid_spec_tokens = self._beyond_limits(scheduled)
            sources, self._sources = self._sources, {}
            of_step = {}
            for name, source in sources.items():
                if name in scheduled.num_scheduled_tokens:
                    of_step[name] = source
                elif keeps_drafts(self.requests.get(name)):  # left out of this step
                    self._sources[name] = source
            self.recorder.begin(scheduled, begun, self._load, of_step)
        return scheduled

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Choose K at the end of vLLM's `schedule`, where asynchronous scheduling reads it."""
        if scheduler_output.total_num_scheduled_tokens:
            with self.recorder.controlling():
                self._choose(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        self._trim()

    def _choose(self, scheduled: SchedulerOutput) -> None:
        counts = self._source_counts, self._steps
        for by_request in (self._limits, self._least, self._budgets, *counts):
            for name in by_request.keys() - self.requests.keys():
                del by_request[name]
        if self._forced is not None:
            self._forced.forget_ended(self.requests)
        k_max = self.k_max
        cut = self.recorder.cut_from(scheduled, self.requests)
        load = load_of(scheduled, self.requests, self._limits, k_max, cut, self._pads)
        self._load, k = load, self.k_policy.choose(load)
        if self._pads and load.requests_by_draft_limit:  # no request may have more than `most`
            most = sum(map(bool, load.requests_by_draft_limit))
            k = min(k, *(graph for graph in captured_ks(k_max) if graph >= most))
        if load.drafts_off:
            k = 0  # nobody is drafted for, nor will be: on V1 the head reads no prompt of the step
        self._reserved_k = k
        scheduled.num_spec_tokens_to_schedule = self._fitting(scheduled, k)
        attach_plan(scheduled, self.k_policy.plan())

    def _fitting(self, scheduled: SchedulerOutput, k: int) -> int:
        """`k`, or less where a P-EAGLE pass of that size would have more tokens than fit: a step
        was filled with what the K before left, when the policy chooses a larger one. Every request
        of the pass has K - 1 slots beside its tokens, and K = 1 needs none."""
        if not is_parallel(self.vllm_config.speculative_config):
            return k
        budget = self.scheduler_config.max_num_batched_tokens
        room = budget - scheduled.total_num_scheduled_tokens
        most = 1 + room // len(scheduled.num_scheduled_tokens)
        if k <= most:
            return k
        captured = captured_ks(self.k_max) if self.use_v2_model_runner else range(k)
        return max(each for each in captured if each <= most)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take a step's drafts, which vLLM asks for where scheduling is synchronous."""
        super().update_draft_token_ids(draft_token_ids)
        self.recorder.drafted(draft_token_ids, self.requests)
        self._trim()

    def update_draft_token_ids_in_output(
        self, draft_token_ids: Any, scheduler_output: SchedulerOutput
    ) -> None:
        """Take a step's drafts where scheduling is asynchronous, for requests with a grammar."""
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        for name, beyond in (self._beyond_limits(scheduler_output) or {}).items():
            invalid[name] = max(beyond, invalid.get(name, 0))  # both are a request's last drafts
        scheduler_output.num_invalid_spec_tokens = invalid

    def _trim(self) -> None:
        """Do not schedule drafts beyond the limit of their request, on V2."""
        if self.use_v2_model_runner and not self._pads:
            for name, limit in self._limits.items():
                request = self.requests.get(name)
                if request is not None:
                    request.spec_token_ids = request.spec_token_ids[:limit]

    def _beyond_limits(self, scheduled: SchedulerOutput) -> dict[str, int] | None:
        """How many scheduled drafts of each request are beyond its limit. vLLM leaves them out of
        its counts."""
        if not self._pads:
            return None
        drafts = scheduled.scheduled_spec_decode_tokens
        beyond = {
            name: len(drafts[name]) - limit
            for name, limit in self._limits.items()
            if len(drafts.get(name, ())) > limit
        }
        return beyond or None

    def make_spec_decoding_stats(self, stats: Any, **counts: Any) -> Any:
        """Count accepted drafts: update_from_output calls this for each request that had some."""
        name, drafts = counts["request_id"], counts["num_draft_tokens"]
        drafts = min(drafts, self._limits.get(name, drafts))
        if not drafts:  # all beyond the request's limit: no drafts, in vLLM's counts too
            if (metrics := self.requests[name].spec_decode_metrics) is not None:
                metrics.histogram[0] -= 1  # which vLLM is about to raise
            return stats
        accepted = counts["num_accepted_tokens"]
        source = self.recorder.verified(name, drafts, accepted)
        if name in self._source_counts:
            self._source_counts[name].add(source, drafts, accepted)
        if name in self._steps:
            self._verified[name] = (drafts if source == HEAD else 0, accepted)
        return super().make_spec_decoding_stats(stats, **counts)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what a step made: tokens, drafts and its record."""
        self.recorder.ends_next(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._attach_counts(outputs)
        extras = WorkerStepOutput.of(model_runner_output)
        self._sources |= dict.fromkeys(extras.looked_up, LOOKUP)
        if extras.drafts is not None:
            self.update_draft_token_ids(extras.drafts)
        spans: tuple[Span, ...] = ()
        if self._forced is not None and scheduler_output.has_structured_output_requests:
            with self.recorder.controlling():
                self._draft_forced(scheduler_output, self._forced)
            spans = self._forced.take_seen()
        self._end_drafts_before_least()
        self._end_drafts_within_budget()
        self.recorder.end(scheduler_output, model_runner_output, spans)
        return outputs

    def _draft_forced(self, scheduled: SchedulerOutput, forced: ForcedSpans) -> None:
        """Let forced spans take the place of drafts that do not reach as far, where a span gains by
        the step's plan. Legal drafts are made of the same text up to there, and head or lookup know
        better how the target cuts it into tokens."""
        plan = plan_of(scheduled)
        for name in scheduled.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or not request.use_structured_output or request.is_prefill_chunk:
                continue
            most = draft_limit(request.sampling_params, self.num_spec_tokens)
            span = forced.after_newest(request, most)
            count = 0 if plan is None else plan.span_tokens(len(span))
            if count > len(request.spec_token_ids):
                request.spec_token_ids = span[:count]
                self._sources[name] = GRAMMAR
                self.recorder.replaced(name)

    def _end_drafts_before_least(self) -> None:
        """Let drafts end before the request's `min_tokens`, on V1. There vLLM holds back end tokens
        behind all drafts of a step that begins before it, also where they reach beyond it
        (vllm/v1/sample/logits_processor/builtin.py, MinTokensLogitsProcessor)."""
        for name, least in self._least.items():
            request = self.requests.get(name)
            if request is not None and request.num_output_tokens < least:
                most = least - request.num_output_tokens - 1
                request.spec_token_ids = request.spec_token_ids[:most]

    def _end_drafts_within_budget(self) -> None:
        """Let drafts of reasoning that begins among them end at its budget, on V1."""
        for name, budget in self._budgets.items():
            request = self.requests.get(name)
            if request is not None and request.spec_token_ids:
                drafts, start = request.spec_token_ids, self._reasoning_start
                before = request.all_token_ids[request.num_tokens + 1 - len(start) :]
                request.spec_token_ids = drafts[: within_budget(drafts, before, start, budget)]

    def _attach_counts(self, outputs: Any) -> None:
        """Send the counts of a request's drafts with each of its outputs, where the gateway follows
        them, and by source where it reports them. vLLM sends them with the last output, which a
        request that is aborted at a stop string does not have. They are copied, because another
        thread serialises them."""
        for client in outputs.values():
            for output in client.outputs:
                counts, name = output.spec_decode_metrics, output.request_id
                steps = self._steps.get(name)
                if steps is not None and output.new_token_ids:
                    steps.add(*self._verified.get(name, (0, 0)))
                request = self.requests.get(name)
                if (
                    counts is None
                    and request is not None
                    and follows_counts(request.sampling_params)
                ):
                    counts = request.spec_decode_metrics
                by_source = self._source_counts.get(name)
                if counts is not None and by_source is not None:
                    output.spec_decode_metrics = by_source.attached_to(counts)
                elif steps is not None:
                    output.spec_decode_metrics = steps.sent_with(counts, output.finished)
                elif counts is not None and output.spec_decode_metrics is None:
                    output.spec_decode_metrics = replace(
                        counts,
                        histogram=list(counts.histogram),
                        per_step_accepted=[],
                        per_step_drafted=[],
                    )
        self._verified.clear()

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """Let the policy learn from earlier steps. vLLM calls this in every step while the workers
        run it (v1/engine/core.py, step), so that learning costs no time. If the model runs in this
        thread it does: then the policy learns from several steps in a row, with warm caches."""
        if not self._alone:
            self.recorder.tell(self.k_policy)
        elif self.recorder.untold >= self.k_policy.max_unobserved_steps:
            with self.recorder.controlling():
                self.recorder.tell(self.k_policy)
        return super().get_grammar_bitmask(scheduler_output)

    def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command of the gateway, which comes as a utility call of the engine core:
        `state`; `steer` to an Objective's entries; `load_calibration` of measured `cells`;
        `head_changed` after a swap; `recent` for the newest steps, all others for the policy's
        snapshot. Raises ObjectiveError."""
        policy, recorder = self.k_policy, self.recorder
        recorder.tell(policy)
        if command == "recent":
            return {"steps": [s._asdict() | {"load": s.load._asdict()} for s in recorder.recent]}
        if command == "steer":
            policy.set_objective(Objective(**arguments))
        elif command == "load_calibration":
            policy.load_calibration(Cell(*cell) for cell in arguments["cells"])
        elif command == "head_changed":
            policy.head_changed()
        elif command != "state":
            raise ValueError(f"unknown command {command!r}")
        running, waiting = self.get_request_counts()
        return {**policy.snapshot(), "requests": running, "waiting": waiting}


class AsyncDraftingScheduler(DraftingScheduler, AsyncScheduler):
    """The scheduler for the V2 runner, which schedules a step before the drafts of the last one are
    known."""
