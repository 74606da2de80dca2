"""The head's module: what it borrows from the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.model.layers import attend
from tests.drafters.model.whole_text import draft


def test_a_head_without_the_targets_matrices_says_so(config: HeadConfig) -> None:
    head = DraftHead(config, own_embeddings=False)
    with pytest.raises(RuntimeError, match=r"no embeddings of its own: call share\(\)"):
        draft(head, torch.tensor([1]), torch.randn(1, 48), 2)


def test_attention_is_the_same_with_keys_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA under a mask, where no fused kernel takes groups."""
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    allowed = torch.rand(1, 3, 5) < 0.7
    allowed[:, :, 0] = True
    grouped = attend(query, key, value, allowed, repeat=False)
    asked, attention = {}, functional.scaled_dot_product_attention

    def spied(query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor, **options: Any) -> Any:
        asked.update(options, heads=key.shape[1])
        return attention(query, key, *rest, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spied)
    torch.testing.assert_close(attend(query, key, value, allowed, repeat=True), grouped)
    assert asked["heads"] == 6 and asked["enable_gqa"] is False
