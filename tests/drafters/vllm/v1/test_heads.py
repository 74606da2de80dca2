"""The torch module drafts what vLLM drafts, for every variant of a head and both layouts; and our
drafter inside vLLM drafts what the module drafts, whatever K was in the steps before.

A random target, random heads, float32, real engines. Upstream vLLM reads the checkpoints: where
the module differs from it, the module is wrong. It does not see path selectors. Where our drafter
differs from the module, it drafted from hidden states that are not the text's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.model.checkpoint import load_head, save_head
from drafters.model.head import DraftHead
from drafters.model.speculators import save_speculators
from tests.drafters import engine_job
from tests.drafters.vllm.random_heads import (
    CASES,
    Step,
    Target,
    agrees,
    new_head,
    reference,
    steps_of,
)

pytestmark = engine_job.marks()

K = 4
NOT_STOCK = ("selector-draft-vocabulary", "eagle3-few-positions")
STOCK = [name for name in CASES if name not in NOT_STOCK]  # what vLLM drafts with


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(0)
    return Target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> checkpoint."""
    folder = tmp_path_factory.mktemp("heads")
    for name, case in CASES.items():
        head = new_head(case, target)
        if case.speculators:
            save_speculators(head, folder / name, target=str(target.folder), draft_tokens=K)
        else:
            save_head(head, folder / name)
    return {name: folder / name for name in CASES}


@pytest.fixture(scope="module")
def steps(
    target: Target, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Step]]:
    """Name -> what vLLM drafted at every step."""
    engines = {
        name: {"model": str(heads[name])}  # which names its target, its K and its method
        if CASES[name].speculators
        else {"model": str(target.folder), "head": str(heads[name]), "k": K}
        for name in STOCK
    }
    return steps_of(tmp_path_factory.mktemp("engines"), engines, max_tokens=30, stock=True)


@pytest.mark.parametrize("name", STOCK)
def test_every_draft_is_vllms(
    name: str, target: Target, heads: dict[str, Path], steps: dict[str, list[Step]]
) -> None:
    head = target.lend(load_head(heads[name]))
    head.selector = None  # which vLLM does not see
    assert len(steps[name]) > 20
    # Something to tell apart: the last draft of a step differs from step to step.
    assert len({step["draft"][-1] for step in steps[name]}) > 5
    wrong = [step for step in steps[name] if not agrees(head, target, step)]
    assert not wrong, f"{len(wrong)} of {len(steps[name])} steps"


SEVERAL_LAYERS = ["p-eagle", "p-eagle-draft-vocabulary", "eagle3-every-variant"]
ONE_LAYER = ["p-eagle-one-layer", "eagle3-few-positions"]
CONTEXTS: dict[str, dict[str, Any]] = {
    "all is kept": {"catch_up_tokens": 256},
    "much is forgotten": {"catch_up_tokens": 6},
    # In a second layer, keys would know of what the context was cut from.
    "the beginning is cut": {"catch_up_tokens": 256, "context_tokens": 64},
}
SELECTORS = {"selector-draft-vocabulary": "all is kept", "selector": "much is forgotten"}
RESTLESS = [
    *SELECTORS.items(),
    *((name, "much is forgotten") for name in SEVERAL_LAYERS),
    *((name, "all is kept") for name in ("p-eagle", "eagle3-every-variant")),
    *((name, "the beginning is cut") for name in ONE_LAYER),
]


@pytest.fixture(scope="module")
def restless(
    target: Target, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Step]]:
    """Head and context -> what our drafter drafted, with another K at every step."""
    engines = {
        f"{name}, {context}": {
            "model": str(target.folder),
            "head": str(heads[name]),
            "k": 7,
            "block_size": 32,
            "additional_config": {"aerie": {**CONTEXTS[context], "bfloat16_on_cpu": False}},
        }
        for name, context in RESTLESS
    }
    return steps_of(tmp_path_factory.mktemp("restless"), engines, max_tokens=90, stock=False)


@pytest.mark.parametrize(("name", "context"), RESTLESS)
def test_no_draft_comes_from_a_stale_state(
    name: str, context: str, target: Target, heads: dict[str, Path], restless: dict[str, list[Step]]
) -> None:
    head = target.lend(load_head(heads[name]))
    steps = restless[f"{name}, {context}"]
    assert len({len(step["draft"]) for step in steps}) == 7
    wrong = [step for step in steps if not agrees(head, target, step)]
    assert not wrong, f"{len(wrong)} of {len(steps)} steps"
    # What the case is for has happened: contexts began anew, or never did.
    assert any(step["first"] for step in steps) == (context != "all is kept")


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_changes_drafts(
    name: str, target: Target, heads: dict[str, Path], restless: dict[str, list[Step]]
) -> None:
    """Else the comparison above would hold for a drafter without one. The first draft stays."""
    head = target.lend(load_head(heads[name]))
    head.selector = None
    changed = 0
    for step in restless[f"{name}, {SELECTORS[name]}"]:
        ours, _ = reference(head, target, step)
        assert ours[0] == step["draft"][0]
        changed += ours != step["draft"]
    assert changed > 10


def _no_residual_norm(head: DraftHead) -> None:
    head.layers[0].norm_before_residual = False


def _no_output_norm(head: DraftHead) -> None:
    head.config = replace(head.config, norm_output=False)


# What the comparison must notice: part of a head -> (case, how it is spoilt).
FAULTS: dict[str, tuple[str, Callable[[DraftHead], Any]]] = {
    "norm_before_residual": ("p-eagle-draft-vocabulary", _no_residual_norm),
    "norm_output": ("eagle3-every-variant", _no_output_norm),
    "input_norm": ("eagle3-every-variant", lambda head: head.input_norm.weight.fill_(1.0)),
    "o_proj.bias": (
        "eagle3-every-variant",
        lambda head: head.layers[1].self_attn.o_proj.bias.zero_(),
    ),
    "fc_norm": ("p-eagle-speculators", lambda head: head.fc_norm[2].weight.fill_(1.0)),
    "mask_hidden": ("p-eagle", lambda head: head.mask_hidden.zero_()),
    "d2t": ("p-eagle-draft-vocabulary", lambda head: head.d2t.zero_()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_with_one_fault_drafts_otherwise(
    fault: str, target: Target, heads: dict[str, Path], steps: dict[str, list[Step]]
) -> None:
    name, spoil = FAULTS[fault]
    head = target.lend(load_head(heads[name]))
    with torch.no_grad():
        spoil(head)
    assert not all(agrees(head, target, step) for step in steps[name])
