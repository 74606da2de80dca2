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

from drafters.model.checkpoint import load_head, save_head
from drafters.model.head import DraftHead
from drafters.model.speculators import save_speculators
from tests.drafters import engine_job
from tests.drafters.vllm import replicas
from tests.drafters.vllm.random_heads import agrees

pytestmark = [*engine_job.marks(), pytest.mark.replicas]

SCRIPT = Path(__file__).parents[1] / "engine_replicas.py"
K = 7
PROMPTS = [list(range(5, 16)), [3, 190, 77, 12], list(range(120, 60, -1))]
LENGTH = 70  # longer than the sliding windows
FREQUENT = 12  # tokens that the head drafts
TIE = 1e-3  # of logits a few units apart: two implementations, sums in another order


@dataclass(frozen=True)
class Run:
    """A replica, its head, and what the engine made of them."""

    name: str
    target: replicas.Target
    head: DraftHead
    plain: list[list[int]]  # the texts without a head
    result: dict[str, Any]


@pytest.fixture(scope="module", params=replicas.REPLICAS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name: str = request.param
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(name)
    target, checkpoint = replicas.Target(name, folder / "target"), folder / "head"
    job = {"target": str(target.folder), "prompts": PROMPTS, "max_tokens": LENGTH}
    plain = engine_job.run(SCRIPT, folder, {**job, "head": None, "k": 0}, timeout=900)["texts"]
    torch.manual_seed(1)
    head = replicas.new_head(plain, FREQUENT)
    if replicas.REPLICAS[name].speculators:
        save_speculators(head, checkpoint, target=str(target.folder), draft_tokens=K)
    else:
        save_head(head, checkpoint)
    result = engine_job.run(SCRIPT, folder, {**job, "head": str(checkpoint), "k": K}, timeout=900)
    return Run(name, target, load_head(checkpoint), plain, result)


def test_the_head_is_ours_and_drafts_in_parallel(run: Run) -> None:
    report = run.result["report"]
    assert (report["proposer"], report["k"]) == ("ParallelDrafter", K)
    assert report["parallel"] and report["mask_hidden"]


def test_the_text_with_drafts_is_the_text_without(run: Run) -> None:
    result = run.result
    assert [len(text) for text in run.plain] == [LENGTH] * len(PROMPTS)
    assert result["texts"] == run.plain
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
    wrong = [step for step in steps if not agrees(run.head, run.target, step, TIE)]
    assert not wrong, f"{len(wrong)} of {len(steps)} steps"
