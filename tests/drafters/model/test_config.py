"""config.json: what is written, which of other people's files are read, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drafters.model.config import HeadConfig

# An EAGLE-3 head as published before the keys had settled.
OLD: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5]},
}  # fmt: skip


def test_json_has_the_keys_of_parallel_drafting(config: HeadConfig) -> None:
    document = config.to_json("bfloat16")
    assert document["architectures"] == ["LlamaForCausalLMEagle3"]
    assert document["ptd_token_id"] == 3
    assert document["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    # Without this key vLLM supposes three taps, however many are listed.
    assert document["num_aux_hidden_states"] == 3
    assert document["fc_norm"] is True
    assert document["draft_vocab_size"] == document["vocab_size"] == 40


def test_json_of_eagle3_has_no_placeholder(config: HeadConfig) -> None:
    document = replace(config, ptd_token_id=None).to_json("bfloat16")
    assert "ptd_token_id" not in document
    assert HeadConfig.from_json(document).method == "eagle3"


def test_taps_inside_eagle_config() -> None:
    assert HeadConfig.from_json(OLD).eagle_aux_hidden_state_layer_ids == (2, 5)
    # vLLM looks outside first (gpu_model_runner.py, _get_eagle3_aux_layers_from_config) ...
    both = OLD | {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    assert HeadConfig.from_json(both).eagle_aux_hidden_state_layer_ids == (1, 3)
    # ... but for this key inside (llama_eagle3.py).
    nested = OLD["eagle_config"] | {"norm_before_fc": True}
    both = OLD | {"norm_before_fc": False, "eagle_config": nested}
    assert HeadConfig.from_json(both).norm_before_fc


def test_missing_keys_mean_what_they_mean_in_transformers() -> None:
    from transformers import LlamaConfig

    config = HeadConfig.from_json(OLD | {"head_dim": None, "target_hidden_size": None})
    shape = {k: v for k, v in OLD.items() if k != "eagle_config"}
    llama = LlamaConfig(**shape)
    assert config.rms_norm_eps == llama.rms_norm_eps
    assert config.max_position_embeddings == llama.max_position_embeddings
    assert config.num_key_value_heads == llama.num_key_value_heads
    assert config.head_dim == llama.head_dim
    assert config.rope_theta == llama.rope_parameters["rope_theta"]
    assert config.target_hidden_size == config.hidden_size
    assert config.draft_vocab_size is None


@pytest.mark.parametrize("name", ["ptd_token_id", "pard_token", "mask_token_id"])
def test_every_name_of_the_placeholder(name: str) -> None:
    assert HeadConfig.from_json(OLD | {name: 7}).ptd_token_id == 7


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"logit_scale": 0.5},
        {"partial_rotary_factor": 0.5},
        {"layer_types": ["sliding_attention"]},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"eagle_config": OLD["eagle_config"] | {"use_aux_hidden_state": False}},
    ],
    ids=str,
)
def test_other_mathematics_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not supported"):
        HeadConfig.from_json(OLD | keys)


def test_no_taps_are_refused() -> None:
    with pytest.raises(ValueError, match="lacks eagle_aux_hidden_state_layer_ids"):
        HeadConfig.from_json({key: value for key, value in OLD.items() if key != "eagle_config"})


@pytest.mark.parametrize("taps", [(), (2, 1, 3), (1, 1, 2)])
def test_taps_out_of_order_are_refused(config: HeadConfig, taps: tuple[int, ...]) -> None:
    # vLLM hands them over in the order of the layers, so another order would mix them up unseen.
    with pytest.raises(ValueError, match="ascending"):
        replace(config, eagle_aux_hidden_state_layer_ids=taps)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_key_value_heads": 3}, "multiple"),
        ({"ptd_token_id": 40}, "outside the vocabulary"),
        ({"draft_vocab_size": 41}, "no part"),
        ({"norm_before_fc": True}, "exclude"),
    ],
)
def test_impossible_shapes_are_refused(
    config: HeadConfig, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        replace(config, **changes)
