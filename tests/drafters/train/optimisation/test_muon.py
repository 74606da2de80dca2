"""Muon equals torch's own in bfloat16, and makes the same update in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drafters.train.optimisation.muon import Muon, orthogonalised

SHAPES = [(24, 24), (16, 40), (40, 16), (1, 8)]


def matrices(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_in_bfloat16_it_is_torchs_own() -> None:
    ours, theirs = matrices(0), matrices(0)
    optimizer = Muon(ours, lr=0.02, weight_decay=0.01)
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
    )
    for seed in range(4):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimizer.step()
        reference.step()
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=0, atol=2e-4)


def test_a_run_saved_by_torchs_own_goes_on() -> None:
    ours, theirs = matrices(0), matrices(0)
    reference = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.0)
    give_gradients(theirs, 0)
    reference.step()
    optimizer = Muon(ours, lr=0.02)
    optimizer.load_state_dict(reference.state_dict())
    for mine, their in zip(ours, theirs, strict=True):
        assert torch.equal(
            optimizer.state[mine]["momentum_buffer"], reference.state[their]["momentum_buffer"]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_update_is_nearly_orthogonal_and_points_along_the_gradient(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    update = orthogonalised(gradient, dtype)
    assert update.dtype == dtype
    u, singular, vh = torch.linalg.svd(gradient, full_matrices=False)
    # Singular values far below the largest are lifted more slowly.
    found = torch.linalg.svdvals(update.float())
    assert float(found.max()) < 1.3
    assert float(found[: int((singular > 0.1 * singular.max()).sum())].min()) > 0.5
    assert float((update.float() * (u @ vh)).sum()) > 0.65 * len(singular)


def test_a_matrix_without_a_gradient_stays_and_a_vector_is_refused() -> None:
    first, second = matrices(0)[:2]
    before = second.detach().clone()
    optimizer = Muon([first, second], lr=0.02)
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second, before)
    with pytest.raises(ValueError, match="matrices"):
        Muon([nn.Parameter(torch.ones(3))], lr=0.02)
