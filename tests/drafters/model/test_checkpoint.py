"""A head's checkpoint: what vLLM's loader expects, and nothing lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.model.checkpoint import load_head, save_head
from drafters.model.config import HeadConfig
from drafters.model.peagle import PEagleHead


def test_round_trip_keeps_config_and_weights(config: HeadConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = PEagleHead(config).to(torch.bfloat16)
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    assert again.config == config
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_weight_names_are_the_ones_vllm_reads(config: HeadConfig, tmp_path: Path) -> None:
    save_head(PEagleHead(config), tmp_path)
    layer = {
        "input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
        "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }  # fmt: skip
    expected = {"embed_tokens.weight", "fc.weight", "mask_hidden", "norm.weight"}
    expected |= {f"fc_norm.{index}.weight" for index in range(3)}
    expected |= {f"layers.{index}.{name}" for index in range(2) for name in layer}
    expected |= {"layers.0.hidden_norm.weight"}
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == expected
    # The first layer reads embedding and hidden state side by side.
    assert weights["layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    assert weights["layers.1.self_attn.q_proj.weight"].shape == (32, 16)
    assert weights["mask_hidden"].shape == (1, 48)


def test_config_has_the_keys_of_parallel_drafting(config: HeadConfig, tmp_path: Path) -> None:
    save_head(PEagleHead(config), tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["architectures"] == ["LlamaForCausalLMEagle3"]
    assert document["ptd_token_id"] == 3
    assert document["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert document["fc_norm"] is True
    assert document["draft_vocab_size"] == document["vocab_size"] == 40


def test_missing_weight_raises(config: HeadConfig, tmp_path: Path) -> None:
    save_head(PEagleHead(replace(config, num_hidden_layers=1)), tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"num_hidden_layers": 2}))
    with pytest.raises(RuntimeError, match=r"layers\.1"):
        load_head(tmp_path)


@pytest.mark.parametrize("taps", [(), (2, 1, 3), (1, 1, 2)])
def test_taps_out_of_order_are_refused(config: HeadConfig, taps: tuple[int, ...]) -> None:
    # vLLM sorts and deduplicates the list, so another order would mix up the taps in silence.
    with pytest.raises(ValueError, match="ascending"):
        replace(config, eagle_aux_hidden_state_layer_ids=taps)
