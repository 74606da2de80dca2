"""Every architecture that a preset serves, small and random, in the engine that the gateway starts.

For each: the text with drafts is the text without; every draft is what the torch module drafts
from the hidden states of transformers' implementation, whatever K was in the steps before (so the
taps, the draft vocabulary and the head's KV cache are right); and the head's layers share one group
of the KV cache beside sliding and full attention.

    make test ARGS="tests/drafters/vllm/v1/test_replicas.py -m replicas"     # five minutes
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.model.checkpoint import load_head
from tests.drafters import engine_job
from tests.drafters.model.whole_text import draft

pytestmark = engine_job.marks()
replicas = pytest.importorskip("tests.drafters.vllm.replicas", reason="no such transformers")

SCRIPT = Path(__file__).parents[1] / "engine_replicas.py"
K = 7
PROMPTS = [list(range(5, 16)), [3, 190, 77, 12], list(range(120, 60, -1))]
LENGTH = 70  # longer than the sliding windows
FREQUENT = 12  # tokens that the head drafts
TIE = 1e-3  # of logits a few units apart: two implementations, sums in another order
IN_CI: tuple[str, ...] = ()  # architectures of every run; the others with -m replicas


@dataclass(frozen=True)
class Run:
    """A replica, its head, and what the engine made of them."""

    name: str
    target: Any
    head: Any
    result: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in IN_CI else pytest.mark.replicas)
        for name in replicas.REPLICAS
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name: str = request.param
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(name)
    target = replicas.Target(name, folder / "target")
    job = {
        "target": str(target.folder),
        "head": str(folder / "head"),
        "draft_vocabulary": FREQUENT,
        "speculators": replicas.REPLICAS[name].speculators,
        "k": K,
        "prompts": PROMPTS,
        "max_tokens": LENGTH,
    }
    result = engine_job.run(SCRIPT, folder, job, timeout=900)
    return Run(name, target, load_head(folder / "head"), result)


def test_the_head_is_ours_and_drafts_in_parallel(run: Run) -> None:
    report = run.result["report"]
    assert (report["proposer"], report["k"]) == ("ParallelDrafter", K)
    assert report["parallel"] and report["mask_hidden"]


def test_the_text_with_drafts_is_the_text_without(run: Run) -> None:
    result = run.result
    assert [len(text) for text in result["plain"]] == [LENGTH] * len(PROMPTS)
    assert result["drafted"] == result["plain"]
    print(f"{run.name}: {result['accepted']} of {result['offered']} drafts accepted")
    assert result["offered"] > 100
    assert result["accepted"] > 0  # or the comparison has compared nothing


def test_the_head_s_layers_share_one_group(run: Run) -> None:
    groups = run.result["groups"]
    layers = run.target.model.config.num_hidden_layers
    head = [f"model.layers.{layers + index}." for index in range(replicas.HEAD.num_hidden_layers)]
    holding = [
        group for group in groups if any(name.startswith(tuple(head)) for name in group["layers"])
    ]
    print(f"{run.name}: {[(group['kind'], len(group['layers'])) for group in groups]}")
    assert len(holding) == 1
    assert sum(len(group["layers"]) for group in groups) == layers + len(head)
    assert len(groups) == replicas.REPLICAS[run.name].groups


def test_every_draft_is_the_module_s(run: Run) -> None:
    steps = run.result["steps"]
    assert len(steps) > 20
    assert len({len(step["draft"]) for step in steps}) >= 5  # K changed
    assert len({tuple(step["draft"]) for step in steps}) > 20  # something to tell apart
    wrong = [step for step in steps if not _agrees(run, step)]
    assert not wrong, f"{len(wrong)} of {len(steps)} steps"


def _agrees(run: Run, step: dict[str, Any]) -> bool:
    """Whether the engine's drafts are the module's, or tie with them."""
    text, first, k = step["text"], step["first"], len(step["draft"])
    head = run.head
    seen: list[torch.Tensor] = []
    compute = head.logits
    head.logits = lambda output: seen.append(compute(output)) or seen[-1]
    try:
        taps = run.target.taps(text[:-1], head.config.eagle_aux_hidden_state_layer_ids)[first:]
        entered = torch.tensor(text[first + 1 :])
        ours = draft(head, entered, taps, k).tolist()
    finally:
        del head.logits
    rows = torch.cat(seen)
    tokens = head.to_target(torch.arange(rows.shape[1])).tolist()
    for mine, theirs, row in zip(ours, step["draft"], rows, strict=True):
        gap = row[tokens.index(mine)] - row[tokens.index(theirs)]
        if mine != theirs and gap > TIE:
            return False
    return True
