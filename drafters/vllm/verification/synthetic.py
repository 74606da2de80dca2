"""Drafts accepted by the dice, at given rates: how fast an engine would be, without any weights.

vLLM has this (`rejection_sample_method: synthetic`), but its CPU kernels assert that it is off
(vllm/utils/cpu_triton_utils.py, _rejection_greedy_sample_kernel_impl). This takes their place
there. The text means nothing.
"""

from __future__ import annotations

import torch

from drafters.ops.argmax import argmax


def tokens(
    drafts: torch.Tensor,  # [sum of drafts]
    logits: torch.Tensor,  # [sum of drafts, vocabulary]
    counts: list[int],  # drafts per request
    rates: torch.Tensor,  # [K], of a position if all before it are accepted
) -> torch.Tensor:
    """The tokens that verification is to find, `[sum of drafts]`: the draft itself as often as
    its position's rate says, and otherwise another, the target's own where that differs."""
    positions = torch.cat([torch.arange(count) for count in counts]).to(rates.device)
    accepted = torch.rand(len(drafts), device=rates.device) < rates[positions]
    drafted = drafts.long()
    others = argmax(logits)
    others = torch.where(others == drafted, (others + 1) % logits.shape[-1], others)
    return torch.where(accepted & (drafted >= 0), drafted, others)
