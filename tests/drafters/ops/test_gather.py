"""Gathered hidden states equal their definition, row by row and bit by bit."""

from __future__ import annotations

import pytest
import torch

from drafters.ops.gather import gather


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize(("fresh", "held"), [([0], []), ([4, 0, 2], [5, 1]), ([], [3]), ([], [])])
def test_rows_are_where_they_belong(
    fresh: list[int], held: list[int], taps: int, dtype: torch.dtype
) -> None:
    """Catches: a tap in another's columns; stored rows over fresh ones; a result of which torch
    made a new tensor because the columns are not contiguous; rows behind the last touched."""
    states = [torch.randn(5, 7).to(dtype) for _ in range(taps)]
    store, out = torch.randn(6, 7 * taps).to(dtype), torch.full((9, 7 * taps), -7.0).to(dtype)
    found = gather(states, torch.tensor(fresh).long(), store, torch.tensor(held).long(), out)
    expected = [torch.cat([state[row] for state in states]) for row in fresh]
    expected += [store[row] for row in held]
    assert len(found) == len(expected)
    assert not expected or found.data_ptr() == out.data_ptr()
    for row, one in enumerate(expected):
        assert torch.equal(found[row], one)
    assert (out[len(expected) :] == -7).all()


def test_too_small_a_buffer_is_an_error() -> None:
    """Catches: a buffer that torch makes anew, with a warning, where nobody looks."""
    states, rows = [torch.ones(4, 3)], torch.arange(3)
    with pytest.raises(AssertionError):
        gather(states, rows, torch.ones(2, 3), torch.arange(2), torch.empty(4, 3))
    with pytest.raises(AssertionError):
        gather(states, rows, torch.ones(2, 3), rows[:0], torch.empty(2, 3))


def test_a_mixed_dtype_is_refused() -> None:
    """Catches: a silent conversion where the buffer was made for another model."""
    with pytest.raises(AssertionError):
        gather(
            [torch.ones(4, 3)], torch.arange(2), torch.ones(2, 3), torch.arange(1),
            torch.empty(4, 3, dtype=torch.bfloat16),
        )  # fmt: skip
