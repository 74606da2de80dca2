"""Corrections of vLLM 0.32.0 itself, each with the fault it mends. Nothing else patches vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import gpu_model_runner

VLLM_VERSION = "0.32.0"


def apply() -> None:
    """Apply every correction once. Raises RuntimeError on any other vLLM."""
    if not vllm.__version__.startswith(VLLM_VERSION):
        raise RuntimeError(f"vllm {vllm.__version__} found, made for {VLLM_VERSION}")
    load = torch.compiler.load_compiled_function
    if not hasattr(load, "__wrapped__"):
        torch.compiler.load_compiled_function = _loads_on_cpu(load)  # type: ignore[assignment]
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        if not hasattr(gpu_model_runner.GPUModelRunner._sample, "__wrapped__"):
            rewind_discarded_samples(gpu_model_runner.GPUModelRunner)


def expand_batch_to_tokens(
    x: torch.Tensor,  # [batch]
    cu_num_tokens: torch.Tensor,  # [batch], inclusive prefix sums of tokens per request
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Each request's value once per draft token of it: `[num_tokens]`.

    vLLM's CPU kernel writes into an int64 copy of the result and drops it
    (vllm/utils/cpu_triton_utils.py, _expand_kernel_impl), so that temperature, top_k and
    top_p of every batch with a sampled request are uninitialised memory: greedy requests
    change their text beside sampled ones, and a seed does not repeat.
    """
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return values.repeat_interleave(counts.long(), output_size=num_tokens)


def rewind_discarded_samples(runner: Any) -> None:
    """Let seeded requests survive a prompt that is read in several steps on a CPU.

    A step that reads only a part of a prompt samples a token and discards it; the request's
    generator must not have moved. vLLM turns back the generator's offset
    (v1/worker/gpu_model_runner.py, _bookkeeping_sync), which only CUDA generators have: on a CPU
    the call raises, and one request with a `seed` and a long prompt ends the engine.
    """
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync

    @wraps(sample)
    def sample_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        found = [self.input_batch.generators.get(int(row)) for row in discarded]
        states = [(item, item.get_state()) for item in found if item is not None]
        output = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    @wraps(bookkeeping)
    def without_generators(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    runner._sample, runner._bookkeeping_sync = sample_and_rewind, without_generators


def _loads_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled models saved by the CPU backend cannot be loaded again, so that every start
    compiles: after loading, vLLM calls `finalize_loading` (vllm/compilation/decorators.py,
    _try_load_aot_compiled_fn), which only its own GPU compiler's artefacts have. On CPU the
    artefact is inductor's plain function, complete as loaded.
    """

    @wraps(load)
    def load_and_complete(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda _config: None
        return loaded

    return load_and_complete
