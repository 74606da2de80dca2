"""A target and a head with random weights, small enough for brute force."""

from __future__ import annotations

import pytest
import torch

from drafters.model.config import HeadConfig
from drafters.model.llama import Llama, LlamaShape
from drafters.model.peagle import PEagleHead

Pair = tuple[Llama, PEagleHead]


@pytest.fixture
def pair() -> Pair:
    torch.manual_seed(5)
    shape = LlamaShape(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
        rope_theta=10000.0, max_position_embeddings=128,
    )  # fmt: skip
    config = HeadConfig(
        vocab_size=24, hidden_size=16, target_hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        ptd_token_id=3, eagle_aux_hidden_state_layer_ids=(1, 2), max_position_embeddings=128,
    )  # fmt: skip
    target, head = Llama(shape).eval().requires_grad_(False), PEagleHead(config)
    with torch.no_grad():
        for module in (target, head):
            for parameter in module.parameters():
                parameter.normal_(std=0.3)
    return target, head
