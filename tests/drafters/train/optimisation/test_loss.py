"""Losses over a draft vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.model.checkpoint import WEIGHTS, save_head
from drafters.train.optimisation.head_init import known_head
from drafters.train.optimisation.loss import DraftLoss, Kind
from drafters.train.target import FrozenTarget
from tests.drafters.train.conftest import NewHead

DRAFTED = torch.tensor([30, 2, 17, 9, 25])  # the commonest first, as NVIDIA's modelopt lists them


@pytest.mark.parametrize("kind", ["labels", "distribution"])
def test_the_order_of_a_draft_vocabulary_does_not_matter(
    new_head: NewHead, target: FrozenTarget, kind: Kind, tmp_path: Path
) -> None:
    """The fault: rows of a head were taken for those of other tokens unless its file listed the
    tokens in ascending order, and training destroyed it."""
    order = DRAFTED.argsort()
    head = new_head(draft_vocab_size=len(DRAFTED))
    head.set_draft_vocabulary(DRAFTED[order])
    save_head(head, tmp_path)
    torch.manual_seed(0)
    output, final = torch.randn(2, len(DRAFTED), 16)
    losses = []
    for permuted in (False, True):
        if permuted:
            stored = load_file(tmp_path / WEIGHTS)
            stored["d2t"] = DRAFTED - torch.arange(len(DRAFTED))
            stored["lm_head.weight"] = stored["lm_head.weight"][order.argsort()]
            del stored["t2d"]
            save_file(stored, tmp_path / WEIGHTS)
        loaded = known_head(target, tmp_path, torch.float32)
        loss = DraftLoss(loaded, target.lm_head, kind)
        wanted = loss.wanted(DRAFTED)
        assert torch.equal(loaded.to_target(wanted), DRAFTED)
        losses.append(loss.backward(output.clone().requires_grad_(), wanted, final, 1.0))
    assert torch.equal(*losses)
