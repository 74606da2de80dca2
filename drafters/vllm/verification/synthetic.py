"""Accept drafts at random, at given rates: how fast an engine would be with a head that good.

vLLM has this (`rejection_sample_method: synthetic`), but its CPU kernels assert that it is off
(vllm/utils/cpu_triton_utils.py, _rejection_greedy_sample_kernel_impl). This replaces them there.
The text means nothing.
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
    """The tokens that verification compares drafts with, `[sum of drafts]`: the draft itself with
    its position's rate, else another token, the target's own if that differs."""
    positions = torch.cat([torch.arange(count) for count in counts]).to(rates.device)
    accepted = torch.rand(len(drafts), device=rates.device) < rates[positions]
    drafted = drafts.long()
    others = argmax(logits)
    others = torch.where(others == drafted, (others + 1) % logits.shape[-1], others)
    return torch.where(accepted & (drafted >= 0), drafted, others)
