"""vLLM's V1 model runner with this project's drafters and verification of drafts."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from importlib.metadata import entry_points
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP, LogitsProcessors, build_logitsprocs

from drafters.config import DrafterConfig
from drafters.control.sources.draft_plan import DraftPlan, SourceChoice, choose_sources
from drafters.vllm.own_drafter import chooses_k, has_own_drafter, is_parallel
from drafters.vllm.scheduling.step_output import WorkerStepOutput, plan_of
from drafters.vllm.v1.drafter import Drafter
from drafters.vllm.v1.huge_pages import collapse
from drafters.vllm.v1.kv_cache import kept_whole
from drafters.vllm.v1.lookup import LookupDrafter
from drafters.vllm.v1.parallel import ParallelDrafter
from drafters.vllm.v1.sequential import SequentialDrafter
from drafters.vllm.verification import greedy
from drafters.vllm.verification.finite import by_request, count_broken
from drafters.vllm.verification.seeded_sampling import SeededRequests

if TYPE_CHECKING:  # mixed into it or a subclass of it
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Base
else:
    Base = object


class NoDrafts:
    """Replaces vLLM's SpecDecodeMetadata in a step that verifies no drafts."""

    def __init__(self, logits_indices: torch.Tensor) -> None:
        self.logits_indices = logits_indices  # [requests], last token of each


class V1DraftingRunner(Base):
    """Mixed into vLLM's runner (vllm/v1/worker/gpu_model_runner.py, cpu_model_runner.py).

    P-EAGLE heads draft through ParallelDrafter, EAGLE-3 heads through SequentialDrafter, with or
    without a head lookups through LookupDrafter, all others through vLLM's own proposers. With and
    without speculation, seeded requests get their randomness by position (seeded_sampling.py).
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.own_drafter: Drafter | None = None
        self.lookup: LookupDrafter | None = None
        self._sources = WorkerStepOutput()  # of this step's drafts
        self._began = self._draft_seconds = 0.0
        # How many rows of each request's logits in this step are not finite: int32 [requests].
        self._broken: torch.Tensor | None = None
        if not hasattr(self, "drafter") or not chooses_k(self.speculative_config):
            return
        config = DrafterConfig.read(vllm_config.additional_config)
        if has_own_drafter(self.speculative_config):
            kind = ParallelDrafter if is_parallel(self.speculative_config) else SequentialDrafter
            self.drafter = self.own_drafter = kind(vllm_config, self.device, self, config)
        self.input_batch.logitsprocs = undrafted_processors(vllm_config, self.device)
        if lookup_k := config.lookup_k(self.num_spec_tokens):
            self.lookup = LookupDrafter(self, lookup_k)

    @property
    def _drafts(self) -> bool:
        """Whether this project drafts here, with a head or by lookup."""
        return self.own_drafter is not None or self.lookup is not None

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """vLLM's specs, with a head's sliding-window layers keeping all tokens (kv_cache.py)."""
        specs: dict[str, Any] = super().get_kv_cache_spec()
        if self.own_drafter is None:
            return specs
        head = self.own_drafter._draft_attn_layer_names
        return kept_whole(specs, head, self.vllm_config.cache_config.block_size)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """On a CPU, move the weights to huge pages and freeze the heap: they are in their final
        place by now, and the model is compiled."""
        if self.device.type == "cpu":
            collapse()
        super().initialize_kv_cache(*args, **kwargs)
        if self.device.type == "cpu":
            freeze_gc_heap()  # as vLLM's worker on a GPU does when it is warm

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target, and note when the step began. Our drafter learns of new and finished
        requests before the runner does."""
        self._began, self._draft_seconds = perf_counter(), 0.0
        self._sources = WorkerStepOutput()
        if self.lookup is not None:
            self.lookup.sync_requests(scheduler_output)
        if self.own_drafter is not None:
            self.own_drafter.sync_requests(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample and draft, and attach drafts and times to the output. An asynchronous output gets
        none: its work has not ended."""
        output = super().sample_tokens(*args, **kwargs)
        if isinstance(output, ModelRunnerOutput):
            drafted = self._drafts and self._draft_token_ids is not None
            drafts = self.take_draft_token_ids() if drafted else None
            draft = self._draft_seconds
            replace(
                self._sources,
                drafts=drafts,
                target_seconds=perf_counter() - self._began - draft,
                draft_seconds=draft,
            ).attach(output)
        return output

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> Any:
        """Let steps without drafts skip the rejection sampler and its metadata."""
        if not self._drafts or num_draft_tokens.any():
            return super()._calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)
        last = torch.from_numpy(cu_num_scheduled_tokens.astype(np.int64) - 1)
        return NoDrafts(last.to(self.device, non_blocking=True))

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        no_drafts = isinstance(spec_decode_metadata, NoDrafts)
        if no_drafts:
            spec_decode_metadata = None
        if logits is not None:  # before sampling, which changes them in place
            self._broken = count_broken(logits)
            if spec_decode_metadata is not None:
                ends = spec_decode_metadata.cu_num_sampled_tokens
                self._broken = by_request(self._broken, ends)
        sampling_metadata = self.input_batch.sampling_metadata
        num_draft_tokens = None
        if spec_decode_metadata is not None:
            synthetic = self.rejection_sampler.synthetic_mode
            if not synthetic and greedy.is_pure_greedy(sampling_metadata):
                return greedy.verify(logits, spec_decode_metadata)
            num_draft_tokens = spec_decode_metadata.num_draft_tokens
        if not sampling_metadata.all_greedy:
            # On CUDA, noise from a generator for each row would cost a kernel each.
            own_seeds = self._drafts and self.device.type == "cpu"
            seeded_requests = SeededRequests.in_batch_of(self, own_seeds=own_seeds)
            generators = seeded_requests.bonus_generators(num_draft_tokens, self.device)
            sampling_metadata.generators = generators
            sampling_metadata.seeded_requests = seeded_requests  # seeded_sampling.accept reads it
        if no_drafts:
            # Each row is behind all drafts of its request. Under speculation vLLM would take rows
            # for those of drafts, and end the thinking of the first request in place of another
            # (vllm/v1/sample/thinking_budget_state.py, _apply_forcing_to_logits).
            return self.sampler(logits, sampling_metadata, predict_bonus_token=True)
        return super()._sample(logits, spec_decode_metadata)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Hide the generators of seeded requests from vLLM, and replace its NaN counts by ours.

        vLLM sets the generators of requests in prefill back, which raises on a CPU (generators have
        no offset there); ours are seeded anew at each step. The first two values are the NaN
        counts: by request, or a tensor `[requests]` for an asynchronous output."""
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            _, _, *rest = super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators
        broken, self._broken = self._broken, None
        if broken is None:
            return {}, None, *rest
        if self.use_async_scheduling:
            return {}, broken, *rest
        # All other work of this step has ended: nothing to wait for.
        counts = zip(self.input_batch.req_ids, broken.tolist(), strict=False)
        return {name: count for name, count in counts if count}, None, *rest

    def _input_fits_in_drafter(self, common: Any) -> bool:
        """Always true for our drafters, which limit K by request. vLLM's drafts for no request if
        one of them is near the largest length."""
        if self._drafts:
            return common is not None
        return bool(super()._input_fits_in_drafter(common))

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: torch.Tensor,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]] | torch.Tensor | None:
        """Draft with our drafter, or vLLM's where there is none of ours, and time it."""
        began = perf_counter()
        if self.own_drafter is None and self.lookup is not None:
            looked_up = self._look_up(plan_of(scheduler_output), self.lookup)
            self._draft_seconds = perf_counter() - began
            return looked_up
        if self.own_drafter is None:
            drafts: torch.Tensor = super().propose_draft_token_ids(
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                spec_decode_metadata,
                common_attn_metadata,
                slot_mappings,
            )
            self._draft_seconds = perf_counter() - began
            return drafts
        step = (
            scheduler_output.scheduled_spec_decode_tokens,
            sampled_token_ids,
            aux_hidden_states or [hidden_states],
            common_attn_metadata,
            sampling_metadata,
        )
        k = scheduler_output.num_spec_tokens_to_schedule
        plan = plan_of(scheduler_output)
        if plan is None or self.lookup is None:
            ours = self.own_drafter.draft(k, *step)
        else:
            ours = self._draft_by_plan(plan, k, step)
        missed = self.own_drafter.missed_tokens_read
        self._sources = replace(self._sources, missed_tokens_read=missed)
        self._draft_seconds = perf_counter() - max(began, self.own_drafter.synchronized)
        return ours

    def _look_up(self, plan: DraftPlan | None, lookup: LookupDrafter) -> list[list[int]] | None:
        """Draft by lookup alone: vLLM has entered the step's tokens in the batch by now."""
        names = self.input_batch.req_ids
        if plan is None:
            return None
        candidates = lookup.candidates(np.full((len(names), 1), -1), None)
        choice = choose_sources(plan, 0, candidates)
        return self._take_lookups(choice, None)

    def _take_lookups(
        self, choice: SourceChoice, drafts: list[list[int]] | None
    ) -> list[list[int]] | None:
        """Add the lookups to the drafts of the head, and note the sources."""
        assert self.lookup is not None
        names = self.input_batch.req_ids
        looked_up = tuple(name for name, count in zip(names, choice.lookups, strict=True) if count)
        self._sources = WorkerStepOutput(
            head_k=choice.k,
            looked_up=looked_up,
            matches=self.lookup.matches,
        )
        if looked_up:
            drafts = drafts or [[] for _ in names]
            for row, count in enumerate(choice.lookups):
                if count:
                    drafts[row] = self.lookup.draft(names[row], count)
        return drafts

    def _draft_by_plan(
        self, plan: DraftPlan, k: int, step: tuple[Any, ...]
    ) -> list[list[int]] | None:
        """Draft for each request with the source that `plan` makes the better one. `step` has the
        arguments of `Drafter.draft` behind its K."""
        assert self.own_drafter is not None and self.lookup is not None
        drafted, sampled, _, common, _ = step
        drafter, names = self.own_drafter, self.input_batch.req_ids
        tokens_made = sampled.cpu().numpy()
        drafter.synchronized = perf_counter()
        unread = drafter.unread(drafter.contexts.slots(names))
        candidates = self.lookup.candidates(tokens_made, unread)
        scheduled = np.diff(common.query_start_loc_cpu.numpy()[: len(names) + 1])
        verified = [len(drafted.get(name, ())) for name in names]
        reading = scheduled > np.array(verified) + 1  # prompts
        choice = choose_sources(plan, k, candidates, reads_prompts=bool(reading.any()))
        drafts = drafter.draft(choice.k, *step, wanting=np.array(choice.head), reading=reading)
        return self._take_lookups(choice, drafts)


def undrafted_processors(vllm_config: Any, device: torch.device) -> LogitsProcessors:
    """Build the logits processors of `logit_bias`, `min_p` and `min_tokens`.

    Under speculation vLLM drops the first two (v1/sample/logits_processor/__init__.py,
    build_logitsprocs) and refuses requests that need them. Our drafters do not draft for such
    requests (limits.py), so each has the one row of logits that the processors expect. Which
    requests an installed processor changes is not known, and verified drafts would skip it. Raises
    ValueError if there is one; vLLM itself refuses those that its options name.
    """
    if installed := [point.value for point in entry_points(group=LOGITSPROCS_GROUP)]:
        raise ValueError(
            f"logits processors {', '.join(installed)} are not applied to drafted tokens: serve "
            "them without a draft head"
        )
    plain = copy(vllm_config)
    plain.speculative_config = None
    return build_logitsprocs(plain, device, is_pin_memory_available(), is_pooling_model=False)
