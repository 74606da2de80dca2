"""Accept draft tokens at random, at given rates: how fast an engine would be with a head that good.

vLLM has this (`rejection_sample_method: synthetic`), but its CPU kernels assert that it is off
(vllm/utils/cpu_triton_utils.py, _rejection_greedy_sample_kernel_impl). This replaces them there.
The text means nothing.
"""

from __future__ import annotations

import torch

from drafters.ops.argmax import argmax


def target_tokens(
    draft_token_ids: torch.Tensor,  # [draft tokens], request by request
    logits: torch.Tensor,  # [draft tokens, vocabulary]
    num_draft_tokens: list[int],  # per request
    rates: torch.Tensor,  # [K], of a position if all before it are accepted
) -> torch.Tensor:
    """The tokens that verification compares draft tokens with, `[draft tokens]`: the draft token
    itself with its position's rate, else another token, the target's own if that differs."""
    positions = torch.cat([torch.arange(count) for count in num_draft_tokens]).to(rates.device)
    accepted = torch.rand(len(draft_token_ids), device=rates.device) < rates[positions]
    draft_token_ids = draft_token_ids.long()
    others = argmax(logits)
    others = torch.where(others == draft_token_ids, (others + 1) % logits.shape[-1], others)
    return torch.where(accepted & (draft_token_ids >= 0), draft_token_ids, others)
