"""A vLLM plugin that breaks the V2 model runner as a GPU would: V2_FAULT says how.

Each fault arises in the engine's own process, where a GPU's arises too, and in nothing but V2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch


def register() -> None:
    """Break what V2_FAULT names; vLLM calls this in each of its processes."""
    if fault := os.environ.get("V2_FAULT"):
        FAULTS[fault]()


def _backend() -> None:
    """The attention backend takes fewer tokens of a request at once than a pass has."""
    from drafters.vllm.v2.speculator import ParallelSpeculator

    def set_attn(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("FLASHINFER decodes at most 6 tokens of a request at once")

    ParallelSpeculator.set_attn = set_attn  # type: ignore[method-assign]


def _shape() -> None:
    """The head's weights have another shape than its configuration says, on whichever runner."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    load = Eagle3LlamaForCausalLM.load_weights

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return load(self, ((n, w[:, :-1] if "up_proj" in n else w) for n, w in weights))

    Eagle3LlamaForCausalLM.load_weights = load_weights


def _nan() -> None:
    """Logits of steps that verify drafts are NaN, as of a kernel that is wrong for several rows."""
    from drafters.vllm.v2.runner import V2DraftingRunner

    whole = V2DraftingRunner.sample

    def sample(self: Any, hidden: Any, batch: Any, grammar: Any) -> Any:
        compute = self.model.compute_logits
        if not batch.num_draft_tokens:
            return whole(self, hidden, batch, grammar)
        with patch.object(self.model, "compute_logits", lambda x: compute(x) * torch.nan):
            return whole(self, hidden, batch, grammar)

    V2DraftingRunner.sample = sample


FAULTS: dict[str, Callable[[], None]] = {
    "backend": _backend,
    "shape": _shape,
    "nan": _nan,
}
