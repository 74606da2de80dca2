"""A head's checkpoint: it is what vLLM's loader expects, and loads without loss."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.model.checkpoint import WEIGHTS, load_head, save_head
from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from drafters.model.rope_scaling import RopeScaling
from drafters.model.speculators import save_speculators

EMBEDDED = Path(__file__).parents[3] / "models" / "embedded" / "p-eagle"

VARIANTS: dict[str, dict[str, Any]] = {
    "p-eagle": {},
    "eagle3": {"ptd_token_id": None, "num_hidden_layers": 1, "fc_norm": False},
    "draft-vocabulary": {"draft_vocab_size": 25},
    "norm_before_fc": {"fc_norm": False, "norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True, "ptd_token_id": None},
    "no-norms": {"fc_norm": False},
    "attention_bias": {"attention_bias": True},
    "four-layers": {"num_hidden_layers": 4},
    "two-taps": {"eagle_aux_hidden_state_layer_ids": (0, 5)},
    "qwen3": {"qk_norm": True, "attention_bias": True},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, 32, truncate=False)},
    "selector": {"path_selector": SelectorConfig(4)},
    "selector-draft-vocabulary": {
        "path_selector": SelectorConfig(4, candidates=5), "target_hidden_size": 8,
        "draft_vocab_size": 25,
    },
    "wider-than-the-target": {"target_hidden_size": 8, "rope_theta": 5e5, "rms_norm_eps": 1e-6},
}  # fmt: skip


def random_head(config: HeadConfig, std: float = 1.0, **own: bool) -> DraftHead:
    torch.manual_seed(0)
    head = DraftHead(config, **own)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=std)
    if config.draft_vocab_size:
        head.set_draft_vocabulary(torch.arange(0, 40)[-config.draft_vocab_size :])
    return head.to(torch.bfloat16)


def rewrite(folder: Path, **weights: torch.Tensor | None) -> None:
    """Set or (None) drop weights of a checkpoint; dots are written `__`."""
    content = load_file(folder / WEIGHTS)
    for name, value in weights.items():
        content.pop(name.replace("__", "."), None)
        if value is not None:
            content[name.replace("__", ".")] = value
    save_file(content, folder / WEIGHTS)


@pytest.mark.parametrize("own_lm_head", [False, True])
@pytest.mark.parametrize("own_embeddings", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_keeps_config_and_weights(
    config: HeadConfig, variant: str, own_embeddings: bool, own_lm_head: bool, tmp_path: Path
) -> None:
    config = replace(config, **VARIANTS[variant])
    head = random_head(config, own_embeddings=own_embeddings, own_lm_head=own_lm_head)
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    assert again.config == config
    wanted, got = head.state_dict(), again.state_dict()
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


def test_weight_names_are_the_ones_vllm_reads(config: HeadConfig, tmp_path: Path) -> None:
    save_head(DraftHead(config), tmp_path)
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
    weights = load_file(tmp_path / WEIGHTS)
    assert set(weights) == expected
    # The first layer reads embedding and hidden state side by side.
    assert weights["layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    assert weights["layers.1.self_attn.q_proj.weight"].shape == (32, 16)
    assert weights["mask_hidden"].shape == (1, 48)


def test_further_names(config: HeadConfig, tmp_path: Path) -> None:
    config = replace(
        config, fc_norm=False, norm_before_fc=True, attention_bias=True, draft_vocab_size=25
    )
    save_head(DraftHead(config, own_embeddings=False), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    assert "embed_tokens.weight" not in weights
    assert weights["input_norm.weight"].shape == (48,)
    assert weights["lm_head.weight"].shape == (25, 16)
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):  # vLLM has a bias on all four
        assert f"layers.1.self_attn.{name}.bias" in weights


def test_what_is_borrowed_is_not_saved(config: HeadConfig, tmp_path: Path) -> None:
    head = random_head(config, own_embeddings=False)
    head.share(embeddings=torch.randn(40, 16), lm_head=torch.randn(64, 16))
    save_head(head, tmp_path)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / WEIGHTS))


def test_a_given_type_is_kept_apart_from_the_integers(config: HeadConfig, tmp_path: Path) -> None:
    save_head(random_head(replace(config, draft_vocab_size=25)), tmp_path)
    head = load_head(tmp_path, torch.float32)
    assert head.fc.weight.dtype == torch.float32
    assert head.to_target(torch.arange(25)).tolist() == list(range(15, 40))


def test_the_first_releases_names(config: HeadConfig, tmp_path: Path) -> None:
    """`midlayer.` for the only layer, and the taps inside `eagle_config`."""
    head = random_head(replace(config, ptd_token_id=None, num_hidden_layers=1))
    save_head(head, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    old = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    assert old.keys() != weights.keys()
    save_file(old, tmp_path / WEIGHTS)
    document = json.loads((tmp_path / "config.json").read_text())
    taps = document.pop("eagle_aux_hidden_state_layer_ids")
    document["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": taps}
    (tmp_path / "config.json").write_text(json.dumps(document))
    again = load_head(tmp_path)
    assert again.config == head.config
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def shard(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Two safetensors files and their index, beside one that the index does not know."""
    names = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    save_file({"fc.weight": torch.zeros(1)}, folder / "another.safetensors")
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "store", [shard, lambda tensors, folder: torch.save(tensors, folder / "pytorch_model.bin")]
)
def test_weights_in_shards_and_in_torchs_own_file(
    config: HeadConfig, store: Callable[[dict[str, torch.Tensor], Path], None], tmp_path: Path
) -> None:
    """And without `t2d`, beside tables that nobody needs."""
    head = random_head(replace(config, draft_vocab_size=25, ptd_token_id=None))
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    del tensors["t2d"]
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    store(tensors, tmp_path)
    again = load_head(tmp_path)
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_a_head_takes_the_place_of_all_weights_in_its_folder(
    config: HeadConfig, layout: str, tmp_path: Path
) -> None:
    """The fault: the shards that were there were read again, and the new file was not."""
    head = random_head(replace(config, path_selector=SelectorConfig(4)), own_lm_head=True)
    tensors = {name: value for name, value in head.state_dict().items() if "selector" not in name}
    shard({name: torch.zeros_like(value) for name, value in tensors.items()}, tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    if layout == "flat":
        save_head(head, tmp_path)
    else:
        save_speculators(head, tmp_path, target="t", draft_tokens=3)
    files = {"config.json", WEIGHTS, "selector"}
    assert {file.name for file in tmp_path.iterdir()} == files
    for name, value in head.state_dict().items():
        assert torch.equal(load_head(tmp_path).state_dict()[name], value), name


def test_what_a_training_run_leaves_beside_the_weights_is_not_read(
    config: HeadConfig, tmp_path: Path
) -> None:
    """The fault: a traceback in serve, doctor and evaluate."""
    save_head(random_head(config), tmp_path)
    torch.save(load_file(tmp_path / WEIGHTS), tmp_path / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    torch.save(argparse.Namespace(lr=1), tmp_path / "training_args.bin")
    assert load_head(tmp_path).config == config
    (tmp_path / "training_args.bin").rename(tmp_path / "another.bin")
    with pytest.raises(ValueError, match=r"another\.bin"):
        load_head(tmp_path)


def test_a_folder_without_weights_says_so(config: HeadConfig, tmp_path: Path) -> None:
    save_head(random_head(config), tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"neither \*\.safetensors nor \*\.bin"):
        load_head(tmp_path)


def test_maps_of_a_full_vocabulary_are_left_out(config: HeadConfig, tmp_path: Path) -> None:
    save_head(random_head(config), tmp_path)
    rewrite(tmp_path, d2t=torch.zeros(40, dtype=torch.int64), t2d=torch.ones(40, dtype=torch.bool))
    assert "d2t" not in load_head(tmp_path).state_dict()
    rewrite(tmp_path, d2t=torch.ones(40, dtype=torch.int64))
    with pytest.raises(ValueError, match="d2t maps to other tokens"):
        load_head(tmp_path)


def test_the_embedded_head_loads() -> None:
    head = load_head(EMBEDDED)
    assert head.config.method == "p-eagle"
    assert bool(head.mask_hidden.any())
    # A saved config says everything that the shipped one does, in the same words.
    shipped = json.loads((EMBEDDED / "config.json").read_text())
    assert shipped.items() <= head.config.to_json(shipped["dtype"]).items()
