"""After a swap the engine drafts what the new head drafts; and a head that does not fit is refused,
and changes nothing. On vLLM's V1 model runner; v2/test_v2.py swaps on V2.

Random heads of every kind, as in test_heads.py, and drafts are accepted at random.
"""

from __future__ import annotations

import json
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
from tests.drafters.vllm.v1.test_heads import (
    CASES,
    P_EAGLE,
    PROMPTS,
    Case,
    Target,
    agrees,
    new_head,
)

pytestmark = engine_job.marks()

SCRIPT = Path(__file__).parent / "engine_swaps.py"
COMPILED = "p-eagle"  # the case whose models are compiled, and have to see the new weights
SELECTING = replace(P_EAGLE, path_selector=SelectorConfig(8))
# The head of the start, and those that take its place one after the other: names of heads, each of
# which has weights of its own. "" is the head of the start.
SWAPS: dict[str, tuple[Case, list[Case | str]]] = {
    "p-eagle": (CASES["p-eagle"], [CASES["p-eagle"], CASES["p-eagle"], ""]),
    "draft-vocabulary": (
        CASES["p-eagle-draft-vocabulary"], [CASES["p-eagle-draft-vocabulary"], ""]
    ),
    "eagle3": (CASES["eagle3"], [CASES["eagle3"], ""]),
    "every-variant": (CASES["eagle3-every-variant"], [CASES["eagle3-every-variant"]]),
    "selector": (CASES["selector-draft-vocabulary"], [CASES["selector-draft-vocabulary"], ""]),
    "selector-comes-and-goes": (Case(P_EAGLE), [Case(SELECTING), "", Case(SELECTING)]),
}  # fmt: skip


def _spoilt(head: Path, folder: Path, how: str) -> Path:
    """A copy of a head that must be refused."""
    shutil.copytree(head, folder)
    weights, config = load_file(folder / WEIGHTS), json.loads((folder / "config.json").read_text())
    if how == "not finite":
        weights["fc.weight"][3, 5] = torch.nan
    elif how == "another shape":
        config["intermediate_size"] = 64
        for name in ("gate_proj", "up_proj"):
            for layer in (0, 1):
                key = f"layers.{layer}.mlp.{name}.weight"
                weights[key] = weights[key][:64].clone()
        for layer in (0, 1):
            key = f"layers.{layer}.mlp.down_proj.weight"
            weights[key] = weights[key][:, :64].clone()
    elif how == "lacks a tensor":
        del weights["norm.weight"]
    elif how == "output matrix of its own":
        weights["lm_head.weight"] = torch.randn(200, 64)
    elif how == "no embeddings of its own":
        del weights["embed_tokens.weight"]
    save_file(weights, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config))
    if how == "truncated":
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    elif how == "gone":
        shutil.rmtree(folder)
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
    found: dict[str, list[Path]] = {}
    for name, (start, later) in SWAPS.items():
        found[name] = []
        for number, case in enumerate([start, *later]):
            if isinstance(case, str):
                found[name].append(found[name][0])
                continue
            save_head(new_head(case, target), folder / f"{name}-{number}")
            found[name].append(folder / f"{name}-{number}")
    found["refused"] = [
        _spoilt(found["p-eagle"][1], folder / how.replace(" ", "-"), how) for how in REFUSALS
    ]
    return found


Result = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def result(
    target: Target, heads: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> Result:
    """Case -> what was drafted with each head; "refused" follows the swaps of "p-eagle", which ends
    with the head of its start."""
    later = {name: heads[name][1:] for name in SWAPS}
    later["p-eagle"] += heads["refused"]
    engines = {
        name: {
            "model": str(target.folder),
            "head": str(heads[name][0]),
            "parallel": not name.startswith(("eagle3", "every")),
            "eager": name != COMPILED,
            "swaps": ["" if head == heads[name][0] else str(head) for head in later[name]],
        }
        for name in SWAPS
    }
    job = {"prompts": PROMPTS, "max_tokens": 40, "engines": engines}
    found: Result = engine_job.run(SCRIPT, tmp_path_factory.mktemp("swaps"), job, timeout=900)
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
