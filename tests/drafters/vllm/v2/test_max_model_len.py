"""The V2 speculator keeps to the length that vLLM fits to the memory after it was built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from drafters.vllm.v2.speculator import ParallelSpeculator


def test_the_length_is_the_runners_when_there_is_a_kv_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: the length of the start kept, so that a pass stores keys behind the end of a
    request's block table, in blocks of another request."""
    builder = SimpleNamespace(reorder_batch_threshold=None)
    spec = SimpleNamespace(block_size=16)
    group = SimpleNamespace(
        get_metadata_builder=lambda: builder,
        kernel_block_size=None,
        kv_cache_spec=spec,
        layer_names=["head"],
    )

    def set_attn(self: Any) -> None:
        self.attn_groups = self.target_attn_groups = [[], [group]]

    monkeypatch.setattr(DraftModelSpeculator, "set_attn", set_attn)
    speculator: Any = ParallelSpeculator.__new__(ParallelSpeculator)
    speculator.requests, speculator.max_model_len = SimpleNamespace(max_model_len=64), 64
    runner: Any = SimpleNamespace(req_states=speculator.requests, max_model_len=64)
    GPUModelRunner.update_max_model_len(runner, 32)
    speculator.set_attn()
    assert speculator.max_model_len == 32 and speculator.group == 1
