"""vLLM's V2 model runner with our speculator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drafters.config import DrafterConfig
from drafters.vllm.runner import is_parallel
from drafters.vllm.v2.speculator import ParallelSpeculator

if TYPE_CHECKING:  # mixed into it or a subclass of it
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Base
else:
    Base = object


class DraftingRunner(Base):
    """Mixed into vLLM's V2 runner (vllm/v1/worker/gpu/model_runner.py). Seeded requests need
    nothing of ours here: vLLM keys their randomness by position."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.parallel: ParallelSpeculator | None = None
        if is_parallel(self.speculative_config) and self.is_last_pp_rank:
            config = DrafterConfig.read(vllm_config.additional_config)
            self.speculator = self.parallel = ParallelSpeculator(
                vllm_config, self.device, self.req_states, config
            )

    def add_requests(self, scheduler_output: Any) -> None:
        """New ones, and those that were preempted."""
        super().add_requests(scheduler_output)
        if self.parallel is not None:
            for new in scheduler_output.scheduled_new_reqs:
                self.parallel.begin(self.req_states.req_id_to_index[new.req_id])
