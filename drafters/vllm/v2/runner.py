"""vLLM's V2 model runner with this project's speculators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from drafters.vllm.own_drafter import (
    chooses_k,
    has_own_drafter,
    is_parallel,
    looks_up,
    name_taps,
)
from drafters.vllm.scheduling.limits import draft_limit
from drafters.vllm.scheduling.step_output import WorkerStepOutput
from drafters.vllm.v2.deferring import DeferringSpeculator
from drafters.vllm.v2.draft_sampling import DeviceDraftSampling
from drafters.vllm.v2.lookup import LookupSpeculator
from drafters.vllm.v2.rejection_sampler import PositionRejectionSampler
from drafters.vllm.v2.request_limits import RequestLimits
from drafters.vllm.v2.sequential import SequentialSpeculator
from drafters.vllm.v2.speculator import ParallelSpeculator
from drafters.vllm.v2.timing import StepMarks, TimedOutput, mark
from drafters.vllm.verification.finite import by_request

if TYPE_CHECKING:  # mixed into it or a subclass of it
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Base
else:
    Base = object


class V2DraftingRunner(Base):
    """Mixed into vLLM's V2 runner (vllm/v1/worker/gpu/model_runner.py).

    P-EAGLE heads draft through ParallelSpeculator, EAGLE-3 heads through SequentialSpeculator,
    lookups through LookupSpeculator, all others through vLLM's own speculators. Where this project
    chooses K, drafts are verified by PositionRejectionSampler. vLLM's samplers count rows of logits
    that are not finite by `count_broken`, which patches.py installs.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.own_speculator: DeferringSpeculator | None = None
        self._began = self._sampled = mark(self.device)
        self._marks_before: StepMarks | None = None  # of the step before
        self.rejection_sampler: Any  # made by vLLM when the target is loaded
        self._limits = RequestLimits(self.max_num_reqs, self.num_speculative_steps, self.device)
        if has_own_drafter(self.speculative_config) and self.is_last_pp_rank:
            parallel = is_parallel(self.speculative_config)
            kind = ParallelSpeculator if parallel else SequentialSpeculator
            self.own_speculator = kind(vllm_config, self.device, self.req_states)
            self.speculator = self.own_speculator
        elif looks_up(self.speculative_config) and self.is_last_pp_rank:
            self.speculator = LookupSpeculator(vllm_config, self.device, self.req_states)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, switch on the count of logits that are not finite, and verify drafts by
        position, within the limits of requests. Drafts are drawn only where that is so."""
        if has_own_drafter(self.speculative_config):
            name_taps(self.speculative_config.draft_model_config.hf_config)
        super().load_model(*args, **kwargs)
        if self.sampler is not None:
            self.sampler.compute_nans = True
        stock = self.rejection_sampler
        if not chooses_k(self.speculative_config) or type(stock) is not RejectionSampler:
            return
        own = self.rejection_sampler = PositionRejectionSampler(
            self._limits, self.sampler, self.speculative_config, self.device,
            watermark_key=stock.watermark_key,
        )  # fmt: skip
        speculator = self.own_speculator
        if own.by_position and speculator is not None and speculator.draft_logits is None:
            speculator.sampling = DeviceDraftSampling(
                self.sampler.sampling_states, self.device, use_fp64=self.sampler.use_fp64_gumbel
            )

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target, and mark where the step begins."""
        if not kwargs.get("dummy_run"):
            self._began = mark(self.device)
        return super().execute_model(*args, **kwargs)

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Sample, and sum the counts of a request's rows: vLLM does so only where ranks share the
        sampling. Samplers of diffusion models count nothing."""
        output, *counts = super().sample(hidden_states, input_batch, grammar_output)
        if self.batch_sharder is None and output.num_nans is not None:
            output.num_nans = by_request(output.num_nans, input_batch.cu_num_logits[1:])
        self._sampled = mark(self.device)
        return output, *counts

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample and draft, and attach times to the output: those of this step on a CPU, which has
        ended it, and of the step before on a GPU."""
        output = super().sample_tokens(*args, **kwargs)
        if not isinstance(output, AsyncModelRunnerOutput):
            return output  # of a rank that does not sample
        before = self._marks_before
        marks = self._marks_before = StepMarks(self._began, self._sampled, mark(self.device))
        if self.device.type == "cuda":
            return TimedOutput(output, before)
        target, draft = marks.seconds() or (0.0, 0.0)
        WorkerStepOutput(None, target, draft).attach(output.model_runner_output)
        return output

    def add_requests(self, scheduler_output: Any) -> None:
        """Add requests, new ones or resumed after a preemption, with their limits of drafts, and
        tell the speculator."""
        super().add_requests(scheduler_output)
        if not chooses_k(self.speculative_config):
            return
        for new in scheduler_output.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index[new.req_id]
            limit = draft_limit(new.sampling_params, self.num_speculative_steps, v2=True)
            self._limits.set(slot, limit)
            if self.own_speculator is not None:
                self.own_speculator.begin(slot)
