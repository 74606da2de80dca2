"""Rotary embeddings equal vLLM's, from the same config.json in both layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config

from drafters.model.config import HeadConfig
from drafters.model.rope import rotate

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "base": {"rope_theta": 5e5},
    "base among the parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3, parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "llama3, one factor": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
    "yarn": {"rope_theta": 1.5e5, "rope_scaling": YARN},
    "yarn of gpt-oss": {
        "rope_theta": 1.5e5,
        "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 16.0, "beta_slow": 1.5,
                         "truncate": False},
    },
    "yarn, magnitudes": {
        "rope_theta": 1e4, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    },
    "yarn, attention factor": {
        "rope_theta": 1e4, "rope_scaling": {**YARN, "attention_factor": 1.3},
    },
    "yarn, no length": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, length outside": {
        "rope_theta": 1e6, "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
}  # fmt: skip
SHAPE = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip


def documents(family: str, rope: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same head in the flat layout and in that of the speculators library."""
    layers = {**SHAPE, **rope, "model_type": family}
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    name = "Eagle3Qwen3ForCausalLM" if family == "qwen3" else "LlamaForCausalLMEagle3"
    return {
        "flat": {**layers, **taps, "architectures": [name]},
        "library": {
            **taps, "speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"],
            "transformer_layer_config": layers, "speculators_config": {"verifier": {}},
        },
    }  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SCALINGS)
def test_queries_are_turned_as_in_vllm(name: str, family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    query = torch.randn(1, 2, 200, 32)
    positions = torch.arange(200)
    for layout, document in documents(family, SCALINGS[name]).items():
        config = HeadConfig.from_json(document)
        (tmp_path / "config.json").write_text(json.dumps(document))
        parameters = getattr(get_config(str(tmp_path), False), "rope_parameters", None)
        if parameters is None and family == "qwen3":  # qwen3.py, set_default_rope_theta
            parameters = {"rope_type": "default", "rope_theta": 1e6}
        with set_current_vllm_config(VllmConfig()):
            rope = get_rope(32, 256, rope_parameters=parameters)
        flat = query[0].transpose(0, 1).reshape(200, 64).clone()
        theirs, _ = rope.forward_native(positions, flat, flat.clone())
        theirs = theirs.view(200, 2, 32).transpose(0, 1)[None]
        ours = rotate(query, positions[None], config.rope_theta, config.rope_scaling)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4, msg=f"{name}, {layout}")
