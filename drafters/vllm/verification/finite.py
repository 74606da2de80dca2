"""Find requests whose logits are not all finite, in every step, and report them as vLLM does.

vLLM counts NaN in logits if VLLM_COMPUTE_NANS_IN_LOGITS is set (v1/worker/gpu_model_runner.py, and
v1/worker/gpu/model_runner.py for V2). Both runners take row i for request i, which is wrong as soon
as a request verifies drafts, and overlook infinity. V1 counts by `isnan().sum()`: for 48 rows of
49,152 in bfloat16 on one CPU thread that takes 55 ms. The sum of each row takes 0.3 ms, and is
finite only if the row is (bench/LOG.md).
"""

from __future__ import annotations

import torch


def broken_rows(logits: torch.Tensor) -> torch.Tensor:
    """Whether each row of `[rows, vocabulary]` has NaN or +infinity: bool `[rows]`.

    -infinity is allowed: grammars and other masks write it. Nothing waits for the device.
    """
    # A sum of finite float16 logits may leave float16's range; with wider types it cannot.
    dtype = torch.float32 if logits.dtype is torch.float16 else None
    sums = logits.sum(-1, dtype=dtype)
    # Of all numbers only NaN and +infinity are not below +infinity.
    return ~(sums < torch.inf)


def by_request(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Number of broken rows of each request: int32 `[requests]`.

    `rows`: `[rows]`, 1 or True where broken; a request with n draft tokens has n + 1 rows in
    succession.
    `ends`: int `[requests]`, inclusive prefix sums of rows per request. Nothing waits for the
    device.
    """
    counts = rows.cumsum(0, dtype=torch.int32)[ends - 1]
    return counts.diff(prepend=counts.new_zeros(1))


def count_broken(logits: torch.Tensor) -> torch.Tensor:
    """Mark broken rows: `[rows, vocabulary]` -> int32 `[rows]`, 1 for a broken row. Replaces
    `get_num_nans` of vLLM's V2 runner (v1/worker/gpu/metrics/logits.py)."""
    return broken_rows(logits).int()
