"""config.json: what is written, which other projects' files are read, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from drafters.model.config import HeadConfig, SelectorConfig, method_of

# An EAGLE-3 head as published before the keys had settled.
OLD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5]},
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
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
    assert "ptd_token_id" not in replace(config, ptd_token_id=None).to_json("bfloat16")


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
        {"bias": True},
        {"is_causal": False},
        {"layer_types": ["chunked_attention"]},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e5}},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"rope_parameters": {"mrope_section": [8, 4, 4]}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": LLAMA3 | {"short_factor": [1.0]}},
        {"eagle_config": OLD["eagle_config"] | {"use_aux_hidden_state": False}},
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
    ],
    ids=str,
)
def test_other_mathematics_is_refused_by_its_key(keys: dict[str, Any]) -> None:
    (key,) = keys
    key = next((inner for inner in ("short_factor", "mrope_section") if inner in str(keys)), key)
    with pytest.raises(ValueError, match="not supported") as refusal:
        HeadConfig.from_json(OLD | keys)
    assert key.split("_")[0] in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_scaling": {"type": "yarn"}}, "needs factor"),
        ({"layer_types": ["sliding_attention"]}, "no sliding_window"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries"),
        ({"num_aux_hidden_states": 3}, "num_aux_hidden_states is 3"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "not a list of layers"),
        ({"architectures": None}, "lacks architectures"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_is_missing_or_contradicts_is_named(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        HeadConfig.from_json(OLD | keys)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("gated", "path_selector is not an object"),
        ({"kind": "gated"}, "path_selector lacks rank"),
        ({"kind": "bilinear", "rank": 4}, r"path_selector\.kind 'bilinear' is not supported"),
        ({"kind": "gated", "rank": 0}, r"path_selector\.rank 0 is not from 1 to 1024"),
        ({"kind": "gated", "rank": 4.0}, r"path_selector\.rank 4\.0 is not"),
        (
            {"kind": "gated", "rank": 4, "candidates": 65},
            r"path_selector\.candidates 65 is not from 1 to 64",
        ),
        ({"kind": "gated", "rank": 4, "candidates": 41}, "more than the 40 draft tokens"),
        ({"kind": "gated", "rank": 4, "depth": 2}, r"path_selector\.depth is not supported"),
    ],
    ids=str,
)
def test_a_path_selector_that_is_not_supported_is_refused_by_its_key(
    config: HeadConfig, value: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        HeadConfig.from_json(config.to_json("bfloat16") | {"path_selector": value})


def test_only_p_eagle_heads_have_a_path_selector(config: HeadConfig) -> None:
    selector = SelectorConfig(4)
    assert config.to_json("bfloat16").get("path_selector") is None
    document = replace(config, path_selector=selector).to_json("bfloat16")
    assert document["path_selector"] == {"kind": "gated", "rank": 4, "candidates": 16}
    with pytest.raises(ValueError, match="path_selector is for P-EAGLE heads"):
        replace(config, path_selector=selector, ptd_token_id=None)


def test_taps_that_are_not_named_are_vllms_default_for_the_targets_depth() -> None:
    silent = {key: value for key, value in OLD.items() if key != "eagle_config"}
    with pytest.raises(ValueError, match="lacks eagle_aux_hidden_state_layer_ids"):
        HeadConfig.from_json(silent)
    for document in (silent, silent | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}):
        config = HeadConfig.from_json(document, target_layers=24)
        assert config.eagle_aux_hidden_state_layer_ids == (2, 12, 21)
    with pytest.raises(ValueError, match="ascending and distinct"):
        HeadConfig.from_json(silent, target_layers=5)  # (2, 2, 2)


@pytest.mark.parametrize("scaling", [
    LLAMA3, {"type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 32.0, "beta_fast": 16.0, "truncate": False,
     "original_max_position_embeddings": 32},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_rotary_embeddings_survive_the_round_trip(key: str, scaling: dict[str, Any]) -> None:
    config = HeadConfig.from_json(OLD | {"rope_theta": 5e5, key: scaling})
    assert config.rope_scaling is not None and config.rope_theta == 5e5
    assert HeadConfig.from_json(config.to_json("bfloat16")) == config


@pytest.mark.parametrize("qk_norm", [False, True])
def test_families_and_windows_survive_the_round_trip(config: HeadConfig, qk_norm: bool) -> None:
    kinds = ("sliding_attention", "full_attention")
    mixed = replace(config, qk_norm=qk_norm, layer_types=kinds, sliding_window=8)
    document = mixed.to_json("bfloat16")
    assert HeadConfig.from_json(document) == mixed
    assert document["model_type"] == ("qwen3" if qk_norm else "llama")
    assert [mixed.window(layer) for layer in (0, 1)] == [8, None]


def test_a_qwen3_configuration_slides_only_where_it_says_so() -> None:
    """As transformers reads it: `sliding_window` alone means nothing."""
    named = {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}
    qwen3 = OLD | named | {"num_key_value_heads": 4}
    window = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    assert HeadConfig.from_json(qwen3 | window).sliding_window is None
    assert HeadConfig.from_json(qwen3 | window | {"use_sliding_window": True}).window(0) == 8
    late = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert HeadConfig.from_json(qwen3 | late).window(0) == 8
    plain = HeadConfig.from_json(qwen3)
    assert plain.qk_norm and plain.head_dim == 128


@pytest.mark.parametrize("name", [
    "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
])  # fmt: skip
def test_llama_layers_by_every_name_that_vllm_has_for_them(name: str) -> None:
    assert not HeadConfig.from_json(OLD | {"architectures": [name]}).qk_norm


def test_the_kind_of_a_head_is_read_without_the_rest() -> None:
    assert method_of({}) == "eagle3"
    assert method_of({"ptd_token_id": 0}) == "p-eagle"
    assert method_of({"speculators_model_type": "peagle"}) == "p-eagle"
    # The library's EAGLE-3 heads have a mask token in their layers' part now and then.
    assert method_of({"speculators_model_type": "eagle3", "mask_token_id": 3}) == "eagle3"


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
        ({"draft_vocab_size": 41}, "not from 1 to 39"),
        ({"norm_before_fc": True}, "exclude"),
    ],
)
def test_impossible_shapes_are_refused(
    config: HeadConfig, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        replace(config, **changes)


def test_a_number_of_heads_that_vllm_does_not_read_is_refused() -> None:
    """transformers checks it for Llama's configurations alone."""
    odd = OLD | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    with pytest.raises(ValueError, match="num_attention_heads 6 does not divide hidden_size 64"):
        HeadConfig.from_json(odd | {"model_type": "llama"})
    assert HeadConfig.from_json(odd | {"model_type": "qwen3"}).num_attention_heads == 6


LIBRARY: dict[str, Any] = {
    "transformer_layer_config": {
        key: value for key, value in OLD.items() if key not in ("architectures", "eagle_config")
    },
    "eagle_aux_hidden_state_layer_ids": [2, 5],
}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 4}
FLAT_QWEN3 = OLD | QWEN3 | {"architectures": ["Eagle3Qwen3ForCausalLM"]}
LIBRARY_EAGLE3 = LIBRARY | {"speculators_model_type": "eagle3"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "flat": OLD,
    "flat, Qwen3 layers": FLAT_QWEN3,
    "flat, Qwen3 layers that may slide":
        FLAT_QWEN3 | {"use_sliding_window": True, "sliding_window": 8},
    "flat, Llama layers of a Qwen3 configuration": OLD | QWEN3,
    "library": LIBRARY_EAGLE3,
    "library, Qwen3 layers": LIBRARY_EAGLE3 | {
        "transformer_layer_config": LIBRARY["transformer_layer_config"] | QWEN3
    },
    "library, P-EAGLE": LIBRARY | {"speculators_model_type": "peagle", "mask_token_id": 7},
}  # fmt: skip
# Keys that a configuration may have, with some of their values.
VALUES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2,),
    "num_key_value_heads": (1, None),
    "head_dim": (8, None),
    "target_hidden_size": (32, None),
    "eagle_aux_hidden_state_layer_ids": ([1, 3, 5], [0], None),
    "num_aux_hidden_states": (2, None),
    "max_position_embeddings": (4096, None),
    "mask_token_id": (7, None),
    "ptd_token_id": (0,),
    "draft_vocab_size": (64, 128, None),
    "rms_norm_eps": (1e-5, None),
    "rope_theta": (5e5, 1000000, None),
    "rope_scaling": (LLAMA3, {"type": "yarn", "factor": 4}, None),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e6}),
    "original_max_position_embeddings": (32,),
    "fc_norm": (True, None),
    "norm_before_fc": (True, None),
    "norm_before_residual": (True, False, None),
    "norm_output": (True, None),
    "attention_bias": (True, None),
    "layer_types": (["full_attention"], ["full_attention"] * 2, ["sliding_attention"], None),
    "sliding_window": (8, None),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 28),
    "path_selector": ({"kind": "gated", "rank": 4}, None),
    "eagle_config": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2]}, {"norm_before_fc": True},
        {"norm_before_fc": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_is_read_survives_the_round_trip(layout: str) -> None:
    """A head that learns was read and written again, and is compared key by key with the one that
    it was made from (drafters/vllm/head_swap.py)."""
    document, configs = LAYOUTS[layout], 0
    pairs = [(name, value) for name, values in VALUES.items() for value in values]
    for keys in map(dict, combinations(pairs, 2)):
        changed = document | keys
        if layers := document.get("transformer_layer_config"):  # a key may be in either part
            changed["transformer_layer_config"] = layers | keys
        try:
            config = HeadConfig.from_json(changed, target_layers=24)
        except ValueError:
            continue
        configs += 1
        assert HeadConfig.from_json(config.to_json("bfloat16")) == config, keys
    assert configs > 500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("num_attention_heads", "head_dim", "num_hidden_layers")
          for value in (0, "x", [1], {"a": 1}, 1.5, True)),
        *((name, value) for name in ("eagle_config", "rope_parameters", "rope_scaling")
          for value in (3, "x", [1])),
        *(("architectures", value) for value in ({"a": 1}, "LlamaForCausalLMEagle3")),
        ("layer_types", 3),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        HeadConfig.from_json(OLD | {name: value})
