"""vLLM's worker with this project's model runners, named by the engine option `worker_cls`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from drafters.vllm.head_swap import HeadSwap
from drafters.vllm.own_drafter import chooses_k
from drafters.vllm.report import DrafterReport

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as Base
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Base


class DraftingWorker(DrafterReport, HeadSwap, Base):
    """vLLM's worker for this platform (vllm/v1/worker/gpu_worker.py, cpu_worker.py), whose model
    runner drafts with this project's drafters and reports logits that are not finite, and whose
    draft head can be swapped."""

    def init_device(self) -> None:
        """Prepare the device and make the model runner. The CPU's worker makes vLLM's own in here
        instead of calling `_make_model_runner`; it has loaded nothing yet and is replaced."""
        if chooses_k(self.vllm_config.speculative_config):
            logging.getLogger("vllm.v1.sample.logits_processor").addFilter(holds_here)
        super().init_device()
        if current_platform.is_cpu():
            self.model_runner = self._make_model_runner()

    def _make_model_runner(self) -> Any:
        """Make this project's subclass of the model runner that vLLM would make. An encoder without
        a language model samples nothing and keeps vLLM's."""
        if self.use_v2_model_runner and self.vllm_config.is_mm_encoder_only:
            return super()._make_model_runner()
        return runner_class(v2=self.use_v2_model_runner)(self.vllm_config, self.device)


def holds_here(record: logging.LogRecord) -> bool:
    """Drop vLLM's warning that `min_p` and `logit_bias` do not work under speculation: beside our
    drafters they do (v1/runner.py, undrafted_processors)."""
    return not record.getMessage().startswith("min_p and logit_bias")


def runner_class(*, v2: bool) -> type:
    """The class of the model runner on this platform: on vLLM's V2 or V1."""
    on_cpu = current_platform.is_cpu()
    if v2:
        from drafters.vllm.v2.runner import V2DraftingRunner

        if on_cpu:
            from vllm.v1.worker.cpu import model_runner as v2_module

            return mixed(V2DraftingRunner, v2_module.CPUModelRunner)
        from vllm.v1.worker.gpu import model_runner as v2_gpu_module

        return mixed(V2DraftingRunner, v2_gpu_module.GPUModelRunner)
    from drafters.vllm.v1.runner import V1DraftingRunner

    if on_cpu:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        return mixed(V1DraftingRunner, CPUModelRunner)
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return mixed(V1DraftingRunner, GPUModelRunner)


def mixed(mixin: type, runner: type) -> type:
    """A subclass of the model runner class `runner` with `mixin` before it."""
    return type(runner.__name__, (mixin, runner), {})
