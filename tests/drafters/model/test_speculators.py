"""The speculators library's layout: vLLM reads it, and it is read back without loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters.model.checkpoint import WEIGHTS, load_head
from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from drafters.model.rope_scaling import RopeScaling
from drafters.model.speculators import save_speculators
from tests.drafters.model.test_checkpoint import random_head

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"fc_norm": False},
    "fc_norm": {},
    "norm_before_fc": {"fc_norm": False, "norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "attention_bias": {"attention_bias": True},
    "draft-vocabulary": {"draft_vocab_size": 25},
    "two-taps": {"eagle_aux_hidden_state_layer_ids": (0, 5)},
    "qwen3": {"qk_norm": True},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8},
    "qwen3-sliding": {
        "qk_norm": True, "layer_types": ("sliding_attention",) * 2, "sliding_window": 8,
    },
    "llama3-rope": {"rope_scaling": RopeScaling("llama3", 8.0, 32)},
    "another-width": {"target_hidden_size": 8},
    "selector": {"path_selector": SelectorConfig(4), "ptd_token_id": 3},
}  # fmt: skip


def new_head(config: HeadConfig, **own: bool) -> DraftHead:
    head = random_head(config, **own)
    embeddings, lm_head = torch.randn(40, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    head.share(embeddings=embeddings, lm_head=lm_head)
    return head


def read(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return document


def test_a_folder_of_a_target_is_found_from_everywhere(
    config: HeadConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: vLLM, started in another folder, took its relative path for a repository."""
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    save_speculators(new_head(config), tmp_path / "head", target="target", draft_tokens=5)
    verifier = read(tmp_path / "head")["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(tmp_path / "target")


@pytest.mark.parametrize("token", [3, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(config: HeadConfig, variant: str, token: int | None, tmp_path: Path) -> None:
    config = replace(config, **{"ptd_token_id": token} | VARIANTS[variant])
    head = new_head(config, own_embeddings=False)
    save_speculators(head, tmp_path, target="organisation/target", draft_tokens=5)
    again = load_head(tmp_path)
    assert again.config == config
    assert not again.own_embeddings
    got = again.state_dict()
    assert torch.equal(got.pop("lm_head.weight"), head.output_matrix)
    wanted = {name: value for name, value in head.state_dict().items() if name != "lm_head.weight"}
    assert ("selector.state.weight" in got) == (config.path_selector is not None)
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("token", [3, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_vllm_reads_every_key(
    config: HeadConfig, variant: str, token: int | None, tmp_path: Path
) -> None:
    reader = pytest.importorskip("vllm.transformers_utils.configs.speculators")
    config = replace(config, **{"ptd_token_id": token} | VARIANTS[variant])
    save_speculators(new_head(config), tmp_path, target="organisation/target", draft_tokens=5)
    understood = reader.SpeculatorsConfig.from_pretrained(tmp_path)
    token = config.ptd_token_id
    kind = "Eagle3" if token is None else "Peagle"
    family = "Qwen3" if config.qk_norm else "Llama"
    assert understood.architectures == [f"{kind}{family}ForCausalLM"]
    for key in NORMS:
        assert getattr(understood, key) == getattr(config, key), key
    taps = config.eagle_aux_hidden_state_layer_ids
    assert understood.eagle_aux_hidden_state_layer_ids == list(taps)
    assert understood.num_aux_hidden_states == len(taps)
    assert getattr(understood, "target_hidden_size", 16) == config.target_hidden_size
    assert understood.draft_vocab_size == (config.draft_vocab_size or config.vocab_size)
    assert understood.attention_bias == config.attention_bias
    if token is not None:
        assert understood.pard_token == token
    serving = reader.SpeculatorsConfig.extract_vllm_speculative_config(read(tmp_path))
    assert serving["method"] == "eagle3"
    assert serving["num_speculative_tokens"] == 5
    assert serving.get("parallel_drafting", False) == (token is not None)


def test_weights_have_the_librarys_shapes(config: HeadConfig, tmp_path: Path) -> None:
    head = new_head(config)
    save_speculators(head, tmp_path, target="organisation/target", draft_tokens=5)
    weights = load_file(tmp_path / WEIGHTS)
    assert weights["mask_hidden"].shape == (1, 1, 48)
    # The target's matrix may have padding, the library's has the vocabulary's rows.
    assert weights["lm_head.weight"].shape == (40, 16)
    assert torch.equal(weights["embed_tokens.weight"], head.state_dict()["embed_tokens.weight"])


def test_the_target_is_named_with_its_architecture(config: HeadConfig, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_speculators(new_head(config), tmp_path / "head", target=str(target), draft_tokens=5)
    verifier = read(tmp_path / "head")["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(("kind", "default"), [("eagle3", True), ("peagle", False)])
def test_the_default_of_norm_before_residual_is_vllms(
    config: HeadConfig, kind: str, default: bool, tmp_path: Path
) -> None:
    config = replace(config, ptd_token_id=3 if kind == "peagle" else None)
    save_speculators(new_head(config), tmp_path, target="organisation/target", draft_tokens=5)
    document = read(tmp_path)
    assert document["speculators_model_type"] == kind
    del document["norm_before_residual"]
    assert HeadConfig.from_json(document).norm_before_residual is default


def test_what_cannot_be_written_or_read_says_why(config: HeadConfig, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no lm_head of its own: call share\(\)"):
        save_speculators(DraftHead(config), tmp_path / "a", target="x", draft_tokens=5)
    with pytest.raises(ValueError, match="draft_tokens"):
        save_speculators(new_head(config), tmp_path / "b", target="x", draft_tokens=0)
    save_speculators(new_head(config), tmp_path, target="x", draft_tokens=5)
    document = read(tmp_path)
    layers = document["transformer_layer_config"]
    for keys, match in (
        ({"speculators_model_type": "dflash"}, "neither eagle3 nor peagle"),
        ({"transformer_layer_config": layers | {"model_type": "gemma"}}, "gemma"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"mask_token_id": None}, "needs mask_token_id"),
    ):
        with pytest.raises(ValueError, match=match):
            HeadConfig.from_json(document | keys)
