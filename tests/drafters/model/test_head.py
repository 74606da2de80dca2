"""The head's module: what it borrows from the target."""

from __future__ import annotations

import pytest
import torch

from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from tests.drafters.model.whole_text import draft


def test_a_head_without_the_targets_matrices_says_so(config: HeadConfig) -> None:
    head = DraftHead(config, own_embeddings=False)
    with pytest.raises(RuntimeError, match=r"no embeddings of its own: call share\(\)"):
        draft(head, torch.tensor([1]), torch.randn(1, 48), 2)
