"""Fixture: a head small enough to check by hand."""

from __future__ import annotations

import pytest

from drafters.model.config import HeadConfig


@pytest.fixture
def config() -> HeadConfig:
    return HeadConfig(
        vocab_size=40, hidden_size=16, target_hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        ptd_token_id=3, eagle_aux_hidden_state_layer_ids=(1, 2, 3), max_position_embeddings=64,
        fc_norm=True,
    )  # fmt: skip
