"""Hits of the prefix cache beside a head are those without drafts, and so is the text behind them:
on both model runners, with one KV cache group and with several. K changes at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.model.checkpoint import save_head
from drafters.model.head import DraftHead
from tests.drafters import engine_job
from tests.drafters.vllm.random_heads import randomise
from tests.drafters.vllm.replicas import HEAD, REPLICAS, Target

pytestmark = engine_job.marks()

SCRIPT = Path(__file__).parent / "engine_prefixes.py"
BLOCK = 32  # tokens; attention on a CPU takes multiples of it
TOKENS = 40  # of an answer: more than a block
BEGINNING = [5 + place * 7 % 180 for place in range(3 * BLOCK)]
# The same prompt again, up to and around the end of a block; prompts with one beginning; a chat's
# next turn, whose prompt holds the answer before.
TURNS = [
    [BEGINNING[: 2 * BLOCK + 1]],
    [BEGINNING[: 2 * BLOCK + 1], BEGINNING[: 2 * BLOCK], BEGINNING[: 2 * BLOCK - 1]],
    [[*BEGINNING, 3, 9], [*BEGINNING, 77, 12, 41]],
    [[*BEGINNING, 3, 9], [*BEGINNING, 77, 12, 41], [*BEGINNING, 8]],
    [[*BEGINNING, 3, 9], [*BEGINNING, 77, 12, 41], [*BEGINNING, 8]],
]
# Kind -> a head of it with embeddings and an output matrix of its own.
HEADS = {"p-eagle": HEAD, "eagle3": replace(HEAD, ptd_token_id=None, num_hidden_layers=1)}
# Whether on V2 -> targets: one KV cache group, sliding and full layers by turns, and blocks of two
# sizes.
TARGETS = {False: ("llama", "gpt_oss", "gemma4_wide"), True: ("llama", "gpt_oss")}
CASES = [(v2, name) for v2, names in TARGETS.items() for name in names]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """Whether on V2 -> what engines of each target, without a head and with either kind, generated.
    One process has them all."""

    @cache
    def run(v2: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("prefixes")
        torch.manual_seed(2)
        for kind, config in HEADS.items():
            head = DraftHead(config, own_embeddings=True, own_lm_head=True)
            randomise(head)
            save_head(head, folder / kind)
        engines: dict[str, Any] = {}
        for name in TARGETS[v2]:
            target = str(Target(name, folder / name).folder)
            engines[f"{name} none"] = {"model": target, "head": None}
            for kind in HEADS:
                engines[f"{name} {kind}"] = {"model": target, "head": str(folder / kind)}
        job = {"v2": v2, "block": BLOCK, "turns": TURNS, "tokens": TOKENS, "engines": engines}
        return engine_job.run(SCRIPT, folder, job, timeout=1500)

    return run


@pytest.fixture(params=CASES, ids=[f"v{1 + v2}-{name}" for v2, name in CASES], scope="module")
def results(
    request: pytest.FixtureRequest, generated: Callable[[bool], dict[str, Any]]
) -> dict[str, Any]:
    """What the engines of one target generated."""
    v2, name = request.param
    if v2:
        pytest.importorskip("triton", reason="the V2 runner needs Triton")
    result = {kind: generated(v2)[f"{name} {kind}"] for kind in ("none", *HEADS)}
    assert result["p-eagle"]["groups"] == REPLICAS[name].groups
    return result


@pytest.mark.parametrize("kind", HEADS)
def test_hits_are_those_without_drafts(kind: str, results: dict[str, Any]) -> None:
    without, beside = results["none"], results[kind]
    print(f"cached: {without['cached']} without, {beside['cached']} beside {kind}")
    assert beside["cached"] == without["cached"]
    assert beside["texts"] == without["texts"]


def test_prompts_and_chats_are_found(results: dict[str, Any]) -> None:
    """Catches: a test that compares nothing with nothing."""
    cached, groups = results["none"]["cached"], results["none"]["groups"]
    assert cached[0] == 0 and cached[1] == 2 * BLOCK
    # The next turn finds its prompt and, beside full attention alone, a block of the answer. Blocks
    # of two sizes are found in multiples of the larger one.
    assert min(cached[-3:]) >= (len(BEGINNING) + BLOCK if groups == 1 else 2 * BLOCK)
