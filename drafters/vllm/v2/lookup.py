"""Lookups on vLLM's V2 model runner: vLLM's own speculator, which runs no kernel at K = 0."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator


class LookupSpeculator(NgramGPUSpeculator):
    """Looks up drafts in every request's text on the device, for a step that is to have some."""

    def propose(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft after a step: int64 `[requests, k_max]`. The runner reads the first
        `num_speculative_tokens` columns, and at 0 none: there is nothing to look up."""
        if kwargs.get("num_speculative_tokens") == 0:
            return self.drafts[: input_batch.num_reqs]
        drafts: torch.Tensor = super().propose(input_batch, *args, **kwargs)
        return drafts
