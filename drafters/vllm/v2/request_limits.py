"""Requests with fewer drafts than K in a batch whose CUDA graphs give each request K of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


class RequestLimits:
    """The largest K of the request in each slot of vLLM's RequestState, on host and device."""

    def __init__(self, slots: int, k_max: int, device: torch.device) -> None:
        self._on_host = np.full(slots, k_max, np.int32)
        self._on_device = torch.full((slots,), k_max, dtype=torch.int32, device=device)

    def set(self, slot: int, limit: int) -> None:
        """Remember the largest K of a new request."""
        if self._on_host[slot] != limit:
            self._on_host[slot] = limit
            self._on_device[slot] = limit

    def beyond(self, batch: InputBatch) -> torch.Tensor | None:
        """Which rows of logits have a draft beyond their request's limit: bool `[rows]`, on the
        device; None if no row has, as the host can tell. The first row of a request has its newest
        token, and the next ones its drafts in order."""
        if (drafts := batch.num_draft_tokens_per_req) is None:
            return None
        if (drafts <= self._on_host[batch.idx_mapping_np]).all():
            return None
        return batch.expanded_local_pos > self._on_device[batch.expanded_idx_mapping]


class LimitingRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler, which rejects drafts beyond a request's limit, whatever they are.
    It treats them as those that a grammar does not allow: the target's token takes their place."""

    def __init__(self, limits: RequestLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits

    def __call__(
        self,
        logits: torch.Tensor,  # [rows, vocabulary]
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,  # bool [rows]
    ) -> SamplerOutput:
        """Verify drafts as vLLM does."""
        beyond = self.limits.beyond(input_batch)
        if beyond is not None and invalid_drafts is not None:
            beyond = beyond | invalid_drafts
        invalid = invalid_drafts if beyond is None else beyond
        output: SamplerOutput = super().__call__(logits, input_batch, draft_logits, invalid)
        return output
