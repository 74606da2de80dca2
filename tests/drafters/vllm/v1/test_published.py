"""Heads in the shapes in which they are published: each loads in `aerie evaluate`, in `aerie train
--init`, in `aerie doctor` and in the engine, and drafts the same there as in the torch module.

A random target of eight layers, random heads, float32. What is published differs in layout, names
of weights and files, and in what the configuration leaves to a default (docs/heads.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.doctor import models
from drafters.model.checkpoint import WEIGHTS, load_head, save_head
from drafters.model.config import default_taps
from drafters.model.rope_scaling import RopeScaling
from drafters.model.speculators import save_speculators
from drafters.train.evaluation.evaluate_head import load_fitting_head
from drafters.train.optimisation.head_init import known_head
from drafters.train.target import FrozenTarget
from tests.drafters import engine_job
from tests.drafters.train.tiny import tokenizer
from tests.drafters.vllm.random_heads import (
    EAGLE_3,
    P_EAGLE,
    Case,
    Step,
    Target,
    agrees,
    new_head,
    steps_of,
)

pytestmark = engine_job.marks()

LAYERS = 8
TAPS = "eagle_aux_hidden_state_layer_ids"
DEFAULT = {TAPS: default_taps(LAYERS)}
LLAMA3 = RopeScaling("llama3", 8.0, 32)
YARN = RopeScaling("yarn", 32.0, 8, beta_fast=16.0, truncate=False)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Published:
    case: Case
    # What its config.json says otherwise than ours would; None: it does not have the key.
    document: dict[str, Any] = field(default_factory=dict)
    weights: Callable[[Weights], Weights] = dict
    torch_file: bool = False


def midlayer(weights: Weights) -> Weights:
    return {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}


def identity(weights: Weights) -> Weights:
    """Maps of a draft vocabulary that is the target's."""
    maps = {"d2t": torch.zeros(200, dtype=torch.int64), "t2d": torch.ones(200, dtype=torch.bool)}
    return midlayer(weights) | maps


def with_batch(weights: Weights) -> Weights:
    return identity(weights) | {"mask_hidden": weights["mask_hidden"][None]}


def without_t2d(weights: Weights) -> Weights:
    return {name: value for name, value in weights.items() if name != "t2d"}


SILENT = dict.fromkeys(
    (TAPS, "num_aux_hidden_states", "target_hidden_size", "fc_norm", "norm_before_fc",
     "norm_before_residual", "norm_output", "attention_bias", "rope_parameters")
)  # fmt: skip
SHAPES = {
    "EAGLE-3, flat, torch's own file, taps and RoPE by default": Published(
        Case(replace(EAGLE_3, **DEFAULT, draft_vocab_size=120), {"own_embeddings": False}),
        SILENT, midlayer, torch_file=True,
    ),
    "EAGLE-3, flat, llama3 RoPE, whole vocabulary with maps, own embeddings": Published(
        Case(replace(EAGLE_3, **DEFAULT, rope_theta=5e5, rope_scaling=LLAMA3),
             {"own_embeddings": True, "own_lm_head": True}),
        {TAPS: None, "num_aux_hidden_states": None, "rope_parameters": None, "rope_theta": 5e5,
         "rope_scaling": LLAMA3.to_json(),
         "eagle_config": {TAPS: [], "use_aux_hidden_state": True}},
        identity,
    ),
    "EAGLE-3, flat, four taps that are not counted": Published(
        Case(replace(EAGLE_3, eagle_aux_hidden_state_layer_ids=(0, 2, 5, 8))),
        {"num_aux_hidden_states": None},
    ),
    "EAGLE-3, flat, sliding and full layers": Published(
        Case(replace(EAGLE_3, num_hidden_layers=2, sliding_window=9,
                     layer_types=("sliding_attention", "full_attention"))),
    ),
    "EAGLE-3, flat, Qwen3 layers that slide": Published(
        Case(replace(EAGLE_3, qk_norm=True, layer_types=("sliding_attention",), sliding_window=9)),
    ),
    "EAGLE-3, library, Llama layers, YaRN": Published(
        Case(replace(EAGLE_3, rope_theta=1.5e5, rope_scaling=YARN, draft_vocab_size=150,
                     norm_before_residual=True), speculators=True),
        weights=without_t2d,
    ),
    "EAGLE-3, library, Qwen3 layers": Published(
        Case(replace(EAGLE_3, qk_norm=True, draft_vocab_size=150, norm_before_residual=True,
                     rope_theta=1e6), {"own_embeddings": False}, speculators=True),
        # `norm_before_residual` is true in vLLM where it is absent.
        {"norm_before_residual": None,
         "transformer_layer_config": {"layer_types": ["full_attention"], "max_window_layers": 28,
                                      "use_sliding_window": False}},
    ),
    "P-EAGLE, flat, llama3 RoPE, whole vocabulary with maps, taps by default": Published(
        Case(replace(P_EAGLE, **DEFAULT, rope_theta=5e5, rope_scaling=LLAMA3),
             {"own_embeddings": True, "own_lm_head": True}),
        {TAPS: None, "num_aux_hidden_states": None}, with_batch,
    ),
    "P-EAGLE, library, Qwen3 layers, five taps, fc_norm beside the layers": Published(
        Case(replace(P_EAGLE, qk_norm=True, fc_norm=True, draft_vocab_size=150,
                     eagle_aux_hidden_state_layer_ids=(1, 2, 4, 6, 8)), speculators=True),
        {"transformer_layer_config": {"fc_norm": None, "num_aux_hidden_states": None}},
    ),
}  # fmt: skip


def changed(document: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    for key, value in keys.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            value = changed(document[key], value)
        document[key] = value
        if value is None:
            del document[key]
    return document


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(0)
    return Target(tmp_path_factory.mktemp("target"), LAYERS)


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> checkpoint, as somebody else would have written it."""
    root = tmp_path_factory.mktemp("heads")
    folders = {name: root / str(number) for number, name in enumerate(SHAPES)}
    for name, shape in SHAPES.items():
        head, folder = new_head(shape.case, target), folders[name]
        if shape.case.speculators:
            save_speculators(head, folder, target=str(target.folder), draft_tokens=3)
        else:
            save_head(head, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(changed(json.loads(path.read_text()), shape.document)))
        weights = shape.weights(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        if shape.torch_file:
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            save_file(weights, folder / WEIGHTS)
    return folders


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_read_as_what_it_is(name: str, heads: dict[str, Path], target: Target) -> None:
    """By `aerie evaluate`, `aerie train --init` and conversion, and `aerie doctor` agrees."""
    wanted = SHAPES[name].case.config
    assert load_head(heads[name], target_layers=LAYERS).config == wanted
    frozen = FrozenTarget(target.model, tokenizer(), target.folder)
    for head in (
        load_fitting_head(heads[name], frozen, "target"),
        known_head(frozen, heads[name], torch.float32),
    ):
        assert head.config == wanted
    checkpoint = models.read_checked_head(LAYERS, heads[name])
    finding = models.check_head(checkpoint, models.read_checkpoint(target.folder), 7)
    assert finding.status != "FAIL", finding.detail
    assert finding.detail.startswith(name.partition(",")[0])


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_written_as_what_it_is(name: str, heads: dict[str, Path], tmp_path: Path) -> None:
    """Generations of a head are, and are swapped in for it if they have its shape."""
    head = load_head(heads[name], target_layers=LAYERS)
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    assert again.config == head.config
    assert again.state_dict().keys() == head.state_dict().keys()


@pytest.fixture(scope="module")
def steps(
    target: Target,
    heads: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, list[Step]]:
    """Name -> what our drafter drafted, with another K at every step, of the selected shapes."""
    served = [
        item for item in request.session.items if "steps" in getattr(item, "fixturenames", ())
    ]
    selected = {item.callspec.params.get("name") for item in served if hasattr(item, "callspec")}
    engines = {
        name: {
            "model": str(target.folder),
            "head": str(heads[name]),
            "k": 7,
            "block_size": 32,
            "additional_config": {"aerie": {"catch_up_tokens": 256, "bfloat16_on_cpu": False}},
        }
        for name in SHAPES
        if name in selected
    }
    return steps_of(tmp_path_factory.mktemp("engines"), engines, max_tokens=60, stock=False)


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_served_as_what_it_is(
    name: str, target: Target, heads: dict[str, Path], steps: dict[str, list[Step]]
) -> None:
    head = target.lend(load_head(heads[name], target_layers=LAYERS))
    found = steps[name]
    assert len({len(step["draft"]) for step in found}) == 7
    assert len({step["draft"][0] for step in found}) > 5
    wrong = [step for step in found if not agrees(head, target, step)]
    assert not wrong, f"{len(wrong)} of {len(found)} steps"
