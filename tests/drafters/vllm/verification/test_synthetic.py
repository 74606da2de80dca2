"""Synthetic acceptance: drafts are accepted at the given rates, whatever the target's tokens."""

from __future__ import annotations

import pytest
import torch
from vllm.utils import cpu_triton_utils

from drafters.vllm.verification import seeded_sampling, synthetic


def test_positions_are_accepted_at_their_rates() -> None:
    torch.manual_seed(5)
    rates = torch.tensor([0.9, 0.5, 0.25])
    counts = [3] * 4000
    drafts = torch.randint(0, 50, (sum(counts),), dtype=torch.int32)
    logits = torch.randn(sum(counts), 50)
    ends = torch.arange(3, sum(counts) + 1, 3)
    bonus = torch.zeros(len(counts), 1, dtype=torch.int32)
    rows = seeded_sampling.accept(
        drafts, counts, 3, ends, None, logits, bonus, object(), synthetic_mode=True,
        synthetic_conditional_rates=rates,
    )  # fmt: skip
    accepted = (rows >= 0).sum(1) - 1  # one token more than the drafts that were right
    reached = torch.tensor([(accepted >= n).float().mean().item() for n in (1, 2, 3)])
    assert torch.allclose(reached, rates.cumprod(0), atol=0.03)


def test_a_rejected_draft_is_never_the_targets_token() -> None:
    """Or acceptance would be higher than asked for wherever the head is right."""
    logits = torch.zeros(4, 8)
    logits[:, 3] = 1.0  # the target would have said 3, too
    drafts = torch.tensor([3, 3, 3, 7], dtype=torch.int32)
    found = synthetic.target_tokens(drafts, logits, [4], torch.zeros(4))
    assert (found != drafts).all()
    assert found[3] == 3


def test_requests_with_fewer_drafts_start_at_the_first_rate() -> None:
    rates = torch.tensor([1.0, 0.0])
    drafts = torch.tensor([5, 6, 6, 5, 6], dtype=torch.int32)
    found = synthetic.target_tokens(drafts, torch.zeros(5, 8), [2, 1, 2], rates)
    assert (found == drafts).tolist() == [True, False, True, True, False]


def test_padding_is_no_draft() -> None:
    drafts = torch.tensor([-1], dtype=torch.int32)
    assert synthetic.target_tokens(drafts, torch.zeros(1, 8), [1], torch.ones(1)).item() >= 0


def test_vllms_own_cpu_kernels_refuse() -> None:
    """When they no longer do, drafters/vllm/verification/synthetic.py has had its day."""
    with pytest.raises(AssertionError, match="Synthetic acceptance not supported"):
        cpu_triton_utils._rejection_greedy_sample_kernel_impl(
            *[None] * 7, uniform_probs=None, synthetic_conditional_rates=None, SYNTHETIC_MODE=True
        )
