"""Where the attention kernel takes smaller blocks than the KV cache has, the V2 speculator's pass
addresses those."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.utils import AttentionGroup

from drafters.vllm.v2.speculator import ParallelSpeculator

BLOCK, KERNEL_BLOCK = 64, 16


def layers(kernel_block: int | None, *names: str) -> AttentionGroup:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return AttentionGroup(FlashAttentionBackend, list(names), spec, 0, kernel_block)


def test_a_graph_reads_the_kernels_blocks_of_this_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a pass that replays a graph builds no attention metadata, which filled the table
    of the kernel's blocks. The graph read the blocks of an earlier pass."""
    group = layers(KERNEL_BLOCK, "head")
    group.kernel_block_table = torch.zeros(1, 2, 3 * 4, dtype=torch.int32)
    group.kernel_block_offsets = torch.arange(4, dtype=torch.int32)
    speculator: Any = ParallelSpeculator.__new__(ParallelSpeculator)
    speculator._held, speculator.device = np.zeros(2, np.int64), torch.device("cpu")
    speculator.max_model_len = speculator.max_num_tokens = 256
    speculator.supports_decode_metadata_update = True
    speculator.attn_groups, speculator.group = [[], [group]], 1
    tables = torch.tensor([[7, 9, 0], [2, 0, 0]], dtype=torch.int32)
    speculator.block_tables = SimpleNamespace(input_block_tables=[None, tables])
    shape = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 2, 4)
    read: list[Any] = []
    monkeypatch.setattr(speculator, "_lay_out", lambda *_: None)
    speculator._graphs = SimpleNamespace(
        find=lambda *_: shape, run=lambda _: read.extend(group.kernel_block_table[0].tolist())
    )
    batch: Any = SimpleNamespace(
        num_reqs=2,
        idx_mapping_np=np.arange(2),
        num_scheduled_tokens=np.full(2, 3, np.int32),
        seq_lens_cpu_upper_bound=torch.full((2,), 70, dtype=torch.int32),
    )
    speculator._pass(batch, [], torch.zeros(2), 2)
    assert read == [
        [28, 29, 30, 31, 36, 37, 38, 39, 0, 1, 2, 3],
        [8, 9, 10, 11, 0, 1, 2, 3, 0, 1, 2, 3],
    ]


@pytest.mark.parametrize(
    ("head", "viewed", "fits"), [(None, None, True), (16, 16, True), (None, 16, False)]
)
def test_blocks_of_another_size_than_the_runners_are_refused(
    head: int | None, viewed: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner views the KV cache of the group in blocks that the target's kernel takes too."""

    def set_attn(self: Any) -> None:
        self.attn_groups = [[], [layers(head, "head")]]
        self.target_attn_groups = [[], [layers(KERNEL_BLOCK, "a"), layers(viewed, "b", "head")]]

    monkeypatch.setattr(DraftModelSpeculator, "set_attn", set_attn)
    speculator: Any = ParallelSpeculator.__new__(ParallelSpeculator)
    speculator.requests = SimpleNamespace(max_model_len=64)
    if fits:
        speculator.set_attn()
        return
    with pytest.raises(NotImplementedError, match=r"in blocks of 64 tokens, the target's .* 16"):
        speculator.set_attn()
