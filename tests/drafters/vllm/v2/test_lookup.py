"""On V2 a step at K = 0 looks nothing up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram

from drafters.vllm.v2.lookup import LookupSpeculator


class Kernel:
    """In the place of a Triton kernel: counts its launches."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*_: Any, **__: Any) -> None:
            self.launches += 1

        return launch


def test_no_kernel_runs_at_k_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: vLLM's speculator read every request's text in each step, whatever its K."""
    kernel = Kernel()
    monkeypatch.setattr(ngram, "_ngram_scan_kernel", kernel)
    monkeypatch.setattr(ngram, "_ngram_finalize_kernel", kernel)
    monkeypatch.setattr(ngram, "triton", SimpleNamespace(next_power_of_2=int))  # may be missing
    speculator: Any = LookupSpeculator.__new__(LookupSpeculator)
    speculator.n_blocks = speculator.min_n = speculator.max_n = speculator.block_l = 1
    speculator.num_speculative_steps, speculator.max_model_len = 3, 16
    table = SimpleNamespace(gpu=torch.zeros(4, 16))
    speculator.req_states = SimpleNamespace(all_token_ids=table, total_len=table)
    speculator.drafts, speculator.scratch = torch.zeros(4, 3), torch.zeros(4, 1)
    batch = SimpleNamespace(num_reqs=2, idx_mapping=torch.arange(2))
    launches = []
    for k in (0, 1, 0, 3):
        drafts = speculator.propose(batch, *[torch.zeros(4)] * 10, num_speculative_tokens=k)
        assert drafts.shape == (2, 3)
        launches.append(kernel.launches)
    assert launches == [0, 2, 2, 4]
