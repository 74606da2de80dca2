"""Requests with fewer drafts than K in a batch whose CUDA graphs give each request K of them."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch


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
