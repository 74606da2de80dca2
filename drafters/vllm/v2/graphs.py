"""CUDA graphs of the drafter's pass on vLLM's V2 runner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

from drafters.config import captured_ks
from drafters.graph_sizes import head_batches

Ints = npt.NDArray[np.int64]


class Graphs:
    """CUDA graphs of the pass, one for each of `captured_ks` and batch size.

    Each K has a manager of vLLM's, which knows one query length. The graph of K has 2 K tokens of
    each request: the K draft tokens that were verified, the token after them, and K - 1 masked
    positions for K more. A pass that enters or drafts fewer, as when K changes, uses it too, padded
    with masked positions that nothing reads. There are graphs for as many requests as the target's
    graphs hold.

    The managers are attributes of the speculator, `owner`: that is where vLLM looks for those that
    it drops, by setting them to None, when it has measured the memory of graphs
    (vllm/v1/worker/gpu/cudagraph_utils.py, profile_cudagraph_memory).
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, k_max: int, owner: object
    ) -> None:
        self._ks, self._owner = [k for k in captured_ks(k_max) if k], owner
        config = copy.copy(vllm_config)
        config.speculative_config = copy.copy(config.speculative_config)
        config.speculative_config.num_speculative_tokens_per_batch_size = None
        compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
        largest = compilation.max_cudagraph_capture_size or 0
        budget = scheduler.max_num_batched_tokens
        for k in self._ks:
            sizes = [2 * k * n for n in head_batches(k, scheduler.max_num_seqs, largest, budget)]
            config = copy.copy(config)
            config.compilation_config = copy.copy(compilation)
            config.compilation_config.cudagraph_capture_sizes = sizes
            config.compilation_config.max_cudagraph_capture_size = max(sizes, default=0)
            manager = DFlashCudaGraphManager(
                config, device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=2 * k
            )
            setattr(owner, _name(k), manager)

    def _manager(self, k: int) -> DFlashCudaGraphManager | None:
        """The manager of graphs for K, or for the next larger one that has some; None if there is
        none, or vLLM has dropped it."""
        captured = next((each for each in self._ks if each >= k), None)
        if captured is None:
            return None
        manager: DFlashCudaGraphManager | None = getattr(self._owner, _name(captured))
        return manager

    def capture(self, generate: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Capture `generate(k, ...)` for each K; the other arguments are those of vLLM's managers.
        The largest K comes first: the others reuse its memory."""
        for k in reversed(self._ks):
            if (manager := self._manager(k)) is not None:
                manager.capture(
                    partial(generate, k), *args, **kwargs,
                    progress_bar_desc=f"Capturing P-EAGLE, K = {k}",
                )  # fmt: skip

    def find(self, k: int, entered: Ints, room: int) -> BatchExecutionDescriptor | None:
        """The shape of a graph for a pass that drafts `k`, or None if no graph fits. `entered`,
        `[requests]`, is how many tokens the pass enters of each request, at most: the device knows
        how many were accepted. `room` is how many positions lie between the last token that the
        longest request may have and the largest length: a graph's part must end within them."""
        if k == 0:
            return None
        # The last entered token, from which drafts begin, must lie within the graph's tokens.
        k = max(k, int(entered.max()) - 1)
        manager, count = self._manager(k), len(entered)
        if manager is None:
            return None
        width = manager.decode_query_len
        if width - int(entered.min()) > room:
            return None
        shape = manager.dispatch(count, count * width, width, 0)
        return shape if shape.cg_mode == CUDAGraphMode.FULL else None

    def run(self, shape: BatchExecutionDescriptor) -> None:
        """Replay the graph of a shape that `find` returned."""
        manager = self._manager(drafted(shape))
        assert manager is not None  # `find` asked it
        manager.run_fullgraph(shape)


def _name(k: int) -> str:
    """The name of the attribute with the manager for K."""
    return f"graph_manager_{k}"


def drafted(shape: BatchExecutionDescriptor) -> int:
    """K of the graph of a shape."""
    assert shape.uniform_token_count is not None
    return shape.uniform_token_count // 2
