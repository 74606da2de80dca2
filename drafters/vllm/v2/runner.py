"""vLLM's V2 model runner with this project's P-EAGLE speculator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drafters.vllm.own_drafter import is_parallel
from drafters.vllm.v2.speculator import ParallelSpeculator
from drafters.vllm.verification.finite import by_request

if TYPE_CHECKING:  # mixed into it or a subclass of it
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Base
else:
    Base = object


class V2DraftingRunner(Base):
    """Mixed into vLLM's V2 runner (vllm/v1/worker/gpu/model_runner.py). Seeded requests need no
    change here: vLLM derives their randomness from the position. Its samplers count rows of logits
    that are not finite by `count_broken`, which patches.py installs."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.parallel: ParallelSpeculator | None = None
        if is_parallel(self.speculative_config) and self.is_last_pp_rank:
            self.speculator = self.parallel = ParallelSpeculator(
                vllm_config, self.device, self.req_states
            )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, and switch on the count of logits that are not finite."""
        super().load_model(*args, **kwargs)
        if self.sampler is not None:
            self.sampler.compute_nans = True

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Sample, and sum the counts of a request's rows: vLLM does so only where ranks share the
        sampling. Samplers of diffusion models count nothing."""
        output, *counts = super().sample(hidden_states, input_batch, grammar_output)
        if self.batch_sharder is None and output.num_nans is not None:
            output.num_nans = by_request(output.num_nans, input_batch.cu_num_logits[1:])
        return output, *counts

    def add_requests(self, scheduler_output: Any) -> None:
        """Add requests, new ones or resumed after a preemption, and tell the speculator."""
        super().add_requests(scheduler_output)
        if self.parallel is not None:
            for new in scheduler_output.scheduled_new_reqs:
                self.parallel.begin(self.req_states.req_id_to_index[new.req_id])
