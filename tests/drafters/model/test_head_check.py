"""One verdict on a head's tensors, whoever asks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.cli import main
from app.doctor.pair import check_models
from app.settings import REPOSITORY, load
from drafters.model.checkpoint import WEIGHTS, load_head, save_head
from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from drafters.model.head_check import TargetSizes, expected_tensors, target_problems
from drafters.model.head_values import head_problems
from drafters.model.speculators import save_speculators
from drafters.train.evaluation.evaluate_head import load_fitting_head
from drafters.train.optimisation.head_init import known_head
from tests.drafters.model.test_checkpoint import VARIANTS

EMBEDDED = REPOSITORY / "models" / "embedded"
TARGET = EMBEDDED / "target"
SHAPE = SimpleNamespace(hidden_size=192, vocab_size=8192, num_hidden_layers=12)
Tensors = dict[str, torch.Tensor]
DRAFTS = 64


@pytest.mark.parametrize("own_lm_head", [False, True])
@pytest.mark.parametrize("own_embeddings", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_expected_is_what_the_head_has(
    config: HeadConfig, variant: str, own_embeddings: bool, own_lm_head: bool
) -> None:
    config = replace(config, **VARIANTS[variant])
    own = {"own_embeddings": own_embeddings, "own_lm_head": own_lm_head}
    state = DraftHead(config, **own).state_dict()
    assert expected_tensors(config, **own) == {name: tuple(t.shape) for name, t in state.items()}


def with_draft_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["draft_vocab_size"] = DRAFTS
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / WEIGHTS)
    weights["lm_head.weight"] = torch.randn(DRAFTS, 192).bfloat16()
    weights["d2t"] = torch.arange(DRAFTS) * 3  # draft i is token 4 i
    weights["t2d"] = torch.arange(8192) % 4 == 0
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def edit(weights: Tensors, name: str, change: Callable[[torch.Tensor], Any] | None) -> None:
    value = weights.pop(name)
    if change is not None:
        value = value.clone()
        result = change(value)
        weights[name] = value if result is None else result.contiguous()


def put(row: int, value: float) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1)[row] = value

    return change


# A tensor, what happens to it, and the words of the verdict.
DAMAGES: dict[str, tuple[str, Callable[[torch.Tensor], Any] | None, str]] = {
    "no output matrix": ("lm_head.weight", None, "lacks lm_head.weight (a draft vocabulary of 64"),
    "no map": ("d2t", None, "lacks d2t"),
    "no fc": ("fc.weight", None, "lacks fc.weight"),
    "no norm": ("layers.0.input_layernorm.weight", None, "lacks layers.0.input_layernorm.weight"),
    "few rows": ("lm_head.weight", lambda t: t[:60], "lm_head.weight has the shape [60, 192], not"),
    "few taps": ("fc.weight", lambda t: t[:, :384], "fc.weight has the shape [192, 384], not"),
    "turned": ("layers.0.mlp.up_proj.weight", lambda t: t.T, "has the shape [192, 512], not [512"),
    "8 bits": (
        "fc.weight", lambda t: t.to(torch.float8_e5m2), "fc.weight has the type F8_E5M2"
    ),
    "integers": ("norm.weight", lambda t: t.int(), "norm.weight has the type I32"),
    "a map of floats": ("d2t", lambda t: t.float(), "d2t has the type F32"),
    "NaN": ("norm.weight", put(7, torch.nan), "norm.weight has 1 values that are not finite"),
    "infinity": (  # which 8 bits cannot hold
        "fc.weight", lambda t: put(-1, -torch.inf)(wide := t.bfloat16()) or wide,
        "fc.weight has 1 values that are not finite",
    ),
    "NaN in 8 bits": (
        "fc.weight", lambda t: (t.float() * torch.nan).to(torch.float8_e4m3fn),
        "values that are not finite",
    ),
    "NaN in half": (
        "fc.weight", lambda t: put(0, torch.nan)(t.half()) or t.half() * torch.nan,
        "fc.weight has 110,592 values",
    ),
    "NaN in float": ("norm.weight", lambda t: t.float() * torch.nan, "norm.weight has 192 values"),
    "beyond": ("d2t", put(-1, 9000), "d2t maps to tokens from 0 to 9063, of 8192"),
    "before": ("d2t", put(0, -1), "d2t maps to tokens from -1 to"),
}  # fmt: skip


@pytest.fixture(params=["eagle3", "p-eagle"])
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A sound head with a draft vocabulary."""
    folder = tmp_path / "head"
    shutil.copytree(EMBEDDED / request.param, folder)
    with_draft_vocabulary(folder)
    return folder


def readers(folder: Path) -> dict[str, Callable[[], object]]:
    """How each command that computes with a head reads it."""
    target: Any = SimpleNamespace(
        shape=SHAPE, dtype=torch.float32, device="cpu",
        embeddings=torch.zeros(8192, 192), lm_head=torch.zeros(8192, 192),
    )  # fmt: skip
    return {
        "load": lambda: load_head(folder),
        "evaluate": lambda: load_fitting_head(folder, target, "t"),
        "train --init": lambda: known_head(target, folder, torch.float32),
    }


def verdicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each caller says of a head; empty if it takes it."""
    said = {}
    for name, ask in readers(folder).items():
        said[name] = ""
        try:
            ask()
        except ValueError as error:
            said[name] = str(error)
    settings = load({"model": str(TARGET), "drafter": str(folder), "k": 3}, {})
    [finding] = [each for each in check_models(settings)[0] if each.check == "head"]
    said["doctor"] = "" if finding.status != "FAIL" else finding.detail
    if finding.status == "FAIL":
        command = ["serve", "--model", str(TARGET), "--drafter", str(folder), "--k", "3"]
        assert main(command) == 1
        said["start"] = capsys.readouterr().err
    return said


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_refused_by_everybody(
    head: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, change, words = DAMAGES[damage]
    weights = load_file(head / WEIGHTS)
    edit(weights, name, change)
    save_file(weights, head / WEIGHTS, {"format": "pt"})
    said = verdicts(head, capsys)
    assert len(said) == 5
    assert [caller for caller, text in said.items() if words not in text] == [], said


def test_a_sound_head_is_taken_by_everybody(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(verdicts(head, capsys).values()) == {""}


def test_mask_hidden_is_what_tells_the_kinds_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, words in (("p-eagle", "lacks mask_hidden"), ("eagle3", "has unknown mask_hidden")):
        folder = tmp_path / kind
        shutil.copytree(EMBEDDED / kind, folder)
        weights = load_file(folder / WEIGHTS)
        if weights.pop("mask_hidden", None) is None:
            weights["mask_hidden"] = torch.zeros(1, 576)
        save_file(weights, folder / WEIGHTS)
        assert all(words in text for text in verdicts(folder, capsys).values())


def with_selector(folder: Path) -> Path:
    """A copy of the embedded P-EAGLE head with a path selector."""
    head = load_head(EMBEDDED / "p-eagle")
    head.add_selector(SelectorConfig(8))
    save_head(head, folder)
    return folder / "selector" / WEIGHTS


# What happens to the selector's file, and the words of the verdict.
SELECTOR_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no file": (
        Path.unlink,
        "lacks selector.before.weight, selector.candidate.weight, selector.norm.weight, "
        "selector.state.bias, selector.state.weight (config.json has path_selector, whose",
    ),
    "no tensor": (
        lambda file: rewrite(file, "before.weight", None), "lacks selector.before.weight (config",
    ),
    "unknown tensor": (
        lambda file: rewrite(file, "after.weight", torch.zeros(8, 192)),
        "has unknown selector.after.weight",
    ),
    "another rank": (
        lambda file: rewrite(file, "candidate.weight", torch.zeros(4, 192)),
        "selector.candidate.weight has the shape [4, 192], not [8, 192]",
    ),
    "integers": (
        lambda file: rewrite(file, "state.bias", torch.zeros(16, dtype=torch.int32)),
        "selector.state.bias has the type I32",
    ),
    "NaN": (
        lambda file: rewrite(file, "state.bias", torch.full((16,), torch.nan)),
        "selector.state.bias has 16 values that are not finite",
    ),
    "truncated": (
        lambda file: file.write_bytes(file.read_bytes()[:-1]) and None,
        "selector/: model.safetensors is truncated",
    ),
    "no key in config.json": (
        lambda file: edit_config(file.parents[1], path_selector=None),
        "has unknown selector.before.weight, selector.candidate.weight, selector.norm.weight, "
        "selector.state.bias, selector.state.weight (selector/ belongs to path_selector",
    ),
    "unknown kind": (
        lambda file: edit_config(file.parents[1], path_selector={"kind": "cubic", "rank": 8}),
        "path_selector.kind 'cubic' is not supported",
    ),
}  # fmt: skip


def rewrite(file: Path, name: str, value: torch.Tensor | None) -> None:
    weights = load_file(file)
    weights.pop(name, None)
    save_file(weights | ({} if value is None else {name: value}), file)


def edit_config(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("damage", SELECTOR_DAMAGES)
def test_a_damaged_path_selector_is_refused_by_everybody(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = SELECTOR_DAMAGES[damage]
    change(with_selector(tmp_path / "head"))
    said = verdicts(tmp_path / "head", capsys)
    assert len(said) == 5
    assert [caller for caller, text in said.items() if words not in text] == [], said


def test_a_sound_path_selector_is_taken_by_everybody_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_selector(tmp_path / "head")
    assert set(verdicts(tmp_path / "head", capsys).values()) == {""}
    settings = load({"model": str(TARGET), "drafter": str(tmp_path / "head"), "k": 3}, {})
    [finding] = [each for each in check_models(settings)[0] if each.check == "head"]
    assert "path selector gated of rank 8" in finding.detail
    save_head(load_head(EMBEDDED / "p-eagle"), tmp_path / "head")  # its selector goes with it
    assert set(verdicts(tmp_path / "head", capsys).values()) == {""}


def test_the_layout_of_the_speculators_library(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "library"
    save_speculators(load_head(head), there, target=str(TARGET), draft_tokens=3)
    assert set(verdicts(there, capsys).values()) == {""}
    weights = load_file(there / WEIGHTS)
    weights["norm.weight"][0] = torch.nan
    del weights["fc_norm.0.weight"]
    save_file(weights, there / WEIGHTS)
    said = verdicts(there, capsys)
    assert all("lacks fc_norm.0.weight" in text for text in said.values()), said


def test_a_quantised_head_is_left_to_vllm(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fault: it was refused for the scales beside its weights, which vLLM reads."""
    weights = load_file(head / WEIGHTS)
    name = "layers.0.mlp.up_proj.weight"
    weights |= {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
    save_file(weights, head / WEIGHTS)
    file = head / "config.json"
    document = json.loads(file.read_text())
    document["quantization_config"] = {"quant_method": "compressed-tensors"}
    file.write_text(json.dumps(document))
    settings = load({"model": str(TARGET), "drafter": str(head), "k": 3}, {})
    [finding] = [each for each in check_models(settings)[0] if each.check == "head"]
    assert (finding.status, "quantised" in finding.detail) == ("warn", True)
    for name in ("load", "evaluate", "train --init"):
        with pytest.raises(ValueError, match="quantised heads"):
            readers(head)[name]()


def test_torchs_own_files(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(head / WEIGHTS)
    (head / WEIGHTS).unlink()
    torch.save(weights, head / "pytorch_model.bin")
    assert set(verdicts(head, capsys).values()) == {""}
    weights["norm.weight"][0] = torch.nan
    torch.save(weights, head / "pytorch_model.bin")
    assert all("norm.weight has 1 values" in text for text in verdicts(head, capsys).values())
    del weights["lm_head.weight"]
    torch.save(weights, head / "pytorch_model.bin")
    assert all("lacks lm_head.weight" in text for text in verdicts(head, capsys).values())


def test_what_is_borrowed_has_the_targets_rows(config: HeadConfig) -> None:
    target = TargetSizes(config.hidden_size, config.vocab_size, 6)
    whole = frozenset({"fc.weight", "embed_tokens.weight", "lm_head.weight"})
    assert target_problems(config, target, frozenset({"fc.weight"})) == []
    wide = replace(config, hidden_size=32, target_hidden_size=config.hidden_size)
    assert target_problems(wide, target, whole) == []
    [problem] = target_problems(wide, target, whole - {"embed_tokens.weight"})
    assert "borrows embed_tokens.weight of width 16" in problem
    [problem] = target_problems(config, replace(target, vocab_size=39), whole)
    assert problem.startswith("vocabulary 40, the target has 39")
    assert target_problems(config, replace(target, layers=2), whole) != []


def test_a_big_head_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value at the end of a tensor that is larger than what is read at once."""
    monkeypatch.setattr("drafters.model.head_values._CHUNK_BYTES", 1000)
    folder = tmp_path / "head"
    shutil.copytree(EMBEDDED / "eagle3", folder)
    weights = load_file(folder / WEIGHTS)
    weights["fc.weight"] = weights["fc.weight"].bfloat16()
    weights["fc.weight"].view(-1)[-1] = torch.inf
    save_file(weights, folder / WEIGHTS)
    problems = head_problems(folder, HeadConfig.load(folder))
    assert problems == ["fc.weight has 1 values that are not finite"]
