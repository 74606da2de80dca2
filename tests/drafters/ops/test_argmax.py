"""The argmax by NumPy equals PyTorch's, also for ties and NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.ops.argmax import argmax


@given(
    st.integers(1, 7),
    st.integers(1, 40),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.integers(0, 2**32 - 1),
)
def test_as_pytorch(rows: int, vocabulary: int, dtype: torch.dtype, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    # Few values: the largest is often there twice.
    logits = torch.randint(-3, 3, (rows, vocabulary), generator=random).to(dtype)
    odd = torch.rand(logits.shape, generator=random)
    logits[odd < 0.1] = -torch.inf
    logits[odd > 0.97] = torch.nan
    got = argmax(logits)
    assert got.tolist() == logits.argmax(-1).tolist()
    assert got.dtype == torch.int64


def test_a_step_without_drafts_has_no_rows() -> None:
    assert argmax(torch.empty(0, 8)).shape == (0,)


@pytest.mark.parametrize("columns", [slice(None, 5), slice(1, None, 2)])
def test_part_of_a_padded_vocabulary(columns: slice) -> None:
    logits = torch.randn(4, 9)[:, columns]
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()
