"""A pass that enters kept hidden states alone has a token of every request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafters.vllm.v2 import deferring
from drafters.vllm.v2.sequential import SequentialSpeculator


def test_no_request_of_a_catch_up_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three requests has just begun, and has no kept state. The fault: two tokens for three
    requests, which FlashInfer's XQA took for three decode steps of one token, and ended the
    engine."""
    speculator: Any = SequentialSpeculator.__new__(SequentialSpeculator)
    speculator._held, speculator.device = np.array([1, 0, 1]), torch.device("cpu")
    speculator.max_model_len, speculator.supports_decode_metadata_update = 256, False
    speculator.max_num_reqs, speculator.window, speculator.group = 3, 4, 0
    slots = torch.zeros(1, 12, dtype=torch.int64)
    speculator.block_tables = SimpleNamespace(slot_mappings=slots)
    speculator.kv_cache_config = None
    passes: list[Any] = []
    monkeypatch.setattr(deferring, "build_slot_mappings_by_layer", lambda *_: {})
    monkeypatch.setattr(
        speculator, "_lay_out", lambda *args: passes.append([args[4].tolist(), args[5]])
    )
    monkeypatch.setattr(
        speculator, "_build_attn_metadata", lambda **given: passes.append(given) or {}
    )
    monkeypatch.setattr(speculator, "_generate", lambda *_: None)
    batch: Any = SimpleNamespace(
        num_reqs=3,
        idx_mapping_np=np.arange(3),
        num_scheduled_tokens=np.array([1, 7, 1], np.int32),
        seq_lens_cpu_upper_bound=torch.full((3,), 70, dtype=torch.int32),
    )
    speculator._catch_up(batch, [])
    (host_rows, total), metadata = passes
    assert host_rows == [[0, 1, 2], [1, 1, 1], [1, 0, 1], [1, 0, 1]] and total == 3
    assert metadata["query_start_loc_np"].tolist() == [0, 1, 2, 3]
    assert not speculator._held.any()
