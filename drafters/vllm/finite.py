"""Requests whose logits are not all finite: found in every step, for vLLM's own way to report them.

vLLM counts NaN in logits if VLLM_COMPUTE_NANS_IN_LOGITS is set (v1/worker/gpu_model_runner.py). It
takes row i for request i, which is wrong as soon as a request verifies drafts, overlooks infinity,
and counts by `isnan().sum()`. For 48 rows of 49,152 in bfloat16 on one CPU thread that takes 55 ms;
the sum of each row takes 0.3 ms and is not finite either (bench/LOG.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def broken_rows(logits: torch.Tensor) -> torch.Tensor:
    """`[rows, vocabulary]` -> bool `[rows]`: whether a row has NaN or +infinity.

    -infinity is what grammars and other masks write. Nothing waits for the device.
    """
    # A sum of finite float16 may be over its range. Those of wider types cannot be.
    dtype = torch.float32 if logits.dtype is torch.float16 else None
    sums = logits.sum(-1, dtype=dtype)
    # Of all numbers only NaN and +infinity are not below +infinity.
    return ~(sums < torch.inf)


def by_request(
    rows: torch.Tensor,  # bool [rows], true for a broken one
    drafts: Sequence[int] | None,  # of each request; None: one row for each request
) -> torch.Tensor:
    """Number of broken rows of each request, int32 `[requests]`: a request with n drafts has n + 1
    rows, one behind the other."""
    if drafts is None:
        return rows.int()
    owners = torch.repeat_interleave(
        torch.arange(len(drafts)), torch.tensor(drafts) + 1, output_size=sum(drafts) + len(drafts)
    )
    counts = torch.zeros(len(drafts), dtype=torch.int32, device=rows.device)
    return counts.index_add_(0, owners.to(rows.device, non_blocking=True), rows.int())
