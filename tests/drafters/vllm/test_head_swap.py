"""After a swap the engine drafts what the new head drafts; and a head that does not fit is refused,
and changes nothing. On vLLM's V1 model runner; v2/test_v2.py swaps on V2.

Random heads of every kind, as in v1/test_heads.py, and drafts are accepted at random.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.model.checkpoint import WEIGHTS, load_head, save_head
from drafters.model.config import SelectorConfig
from tests.drafters import engine_job
from tests.drafters.vllm.random_heads import (
    CASES,
    DRAFTS,
    P_EAGLE,
    PROMPTS,
    Case,
    Target,
    agrees,
    new_head,
    save_heads,
    swaps,
)

pytestmark = engine_job.marks()

COMPILED = "p-eagle"  # the case whose models are compiled, and have to see the new weights
SELECTING = Case(replace(P_EAGLE, path_selector=SelectorConfig(8)))
# The head of the start, and those that take its place one after the other: each has weights of its
# own. "" is the head of the start.
SWAPS: dict[str, list[Case | str]] = {
    "p-eagle": [*[CASES["p-eagle"]] * 3, ""],
    "draft-vocabulary": [*[CASES["p-eagle-draft-vocabulary"]] * 2, ""],
    "eagle3": [*[CASES["eagle3"]] * 2, ""],
    "every-variant": [CASES["eagle3-every-variant"]] * 2,
    "selector": [*[CASES["selector-draft-vocabulary"]] * 2, ""],
    "selector-comes-and-goes": [Case(P_EAGLE), SELECTING, "", SELECTING],
}


def _spoilt(head: Path, folder: Path, how: str, target: Target) -> Path:
    """A copy of a head that must be refused."""
    shutil.copytree(head, folder)
    file = folder / WEIGHTS
    if how == "another shape":
        config = replace(CASES["p-eagle"].config, intermediate_size=64)
        save_head(new_head(Case(config), target), folder)
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "gone":
        shutil.rmtree(folder)
    else:
        weights = load_file(file)
        if how == "not finite":
            weights["fc.weight"][3, 5] = torch.nan
        elif how == "lacks a tensor":
            del weights["norm.weight"]
        elif how == "output matrix of its own":
            weights["lm_head.weight"] = torch.randn(200, 64)
        elif how == "no embeddings of its own":
            del weights["embed_tokens.weight"]
        save_file(weights, file)
    return folder


# What is wrong with a head -> what the refusal says.
REFUSALS = {
    "not finite": "fc.weight has 1 values that are not finite",
    "another shape": "intermediate_size is 64, and 96 in the head of the start",
    "lacks a tensor": "lacks norm.weight",
    "output matrix of its own": "lm_head.weight of its own, and the engine uses the target's",
    "no embeddings of its own": "no embed_tokens.weight, and the head of the start has",
    "truncated": "truncated",
    "gone": "No such file",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(4)
    return Target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Case -> the folder of its head at the start and of each that is swapped in; and "refused"."""
    folder = tmp_path_factory.mktemp("heads")
    found = {name: save_heads(folder, name, cases, target) for name, cases in SWAPS.items()}
    fitting = found["p-eagle"][1]
    found["refused"] = [
        _spoilt(fitting, folder / how.replace(" ", "-"), how, target) for how in REFUSALS
    ]
    return found


Result = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def result(
    target: Target, heads: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> Result:
    """Case -> what was drafted with each head; "refused" follows the swaps of "p-eagle", which ends
    with the head of its start."""
    refused = {"p-eagle": [str(head) for head in heads["refused"]]}
    engines = {
        name: {
            "model": str(target.folder),
            "head": str(heads[name][0]),
            "k": 4,
            "block_size": 32,
            "additional_config": {"aerie": {"bfloat16_on_cpu": False}},
            "async_scheduling": False,
            "enforce_eager": name != COMPILED,
            "swaps": swaps(heads[name]) + refused.get(name, []),
        }
        for name in SWAPS
    }
    job = {"prompts": PROMPTS, "max_tokens": 40, "stock": False, "engines": engines}
    found: Result = engine_job.run(DRAFTS, tmp_path_factory.mktemp("swaps"), job, timeout=900)
    fitting = len(heads["p-eagle"])
    found["refused"] = found["p-eagle"][fitting:]
    del found["p-eagle"][fitting:]
    return found


@pytest.mark.parametrize("name", SWAPS)
def test_the_new_head_drafts(
    name: str, target: Target, heads: dict[str, list[Path]], result: Result
) -> None:
    for number, (folder, entry) in enumerate(zip(heads[name], result[name], strict=True)):
        assert not any("error" in answer for answer in entry["answers"]), entry["answers"]
        steps = entry["steps"]
        assert len(steps) > 10
        head = target.lend(load_head(folder))
        wrong = [step for step in steps if not agrees(head, target, step)]
        assert not wrong, f"{name}, head {number}: {len(wrong)} of {len(steps)} steps"


def test_heads_of_one_case_draft_otherwise(
    target: Target, heads: dict[str, list[Path]], result: Result
) -> None:
    """Else the tests above would hold without a swap."""
    before = target.lend(load_head(heads["p-eagle"][0]))
    assert not all(agrees(before, target, step) for step in result["p-eagle"][1]["steps"])


def test_a_head_that_does_not_fit_changes_nothing(
    target: Target, heads: dict[str, list[Path]], result: Result
) -> None:
    head = target.lend(load_head(heads["p-eagle"][0]))
    for (how, reason), entry in zip(REFUSALS.items(), result["refused"], strict=True):
        staged, swapped = entry["answers"]
        assert reason in staged["error"], (how, staged)
        assert "it is not staged" in swapped["error"]
        assert all(agrees(head, target, step) for step in entry["steps"]), how
