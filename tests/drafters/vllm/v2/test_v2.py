"""Our speculators on vLLM's V2 model runner draft what the torch module drafts, whatever K was in
the steps before, whether or not a step is scheduled before the last one has run, P-EAGLE's in
CUDA graphs of another K and of more requests, and those of a head that has taken the place of
another.

Weights are random as in v1/test_heads.py, and drafts are accepted at random. On a CPU all of the
runner's kernels run in Triton's interpreter, and the calls that a graph would record are run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.config import captured_ks, captured_table
from drafters.model.checkpoint import load_head
from drafters.model.config import SelectorConfig
from tests.drafters import engine_job
from tests.drafters.vllm.random_heads import CASES, PROMPTS, Case, Target, agrees, save_heads, swaps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # on a GPU too

K = 5
SCRIPT = Path(__file__).parents[1] / "engine_drafts_v2.py"
# Head, whether steps overlap, whether graphs are run on a CPU too, the tokens of a step (20 are
# fewer than the pass after a step of vLLM's warm-up would have) and of a request. With graphs each
# request crosses from one block of the KV cache to the next and runs to the end of the longest
# context, where a graph's pass would be longer than the request's blocks and than that context.
LONGEST = 60
ENGINES = [
    ("p-eagle", False, False, 256, 128),
    ("p-eagle-draft-vocabulary", True, False, 20, 128),
    ("p-eagle", True, True, 256, LONGEST),
    ("selector-draft-vocabulary", True, True, 256, LONGEST),
    ("eagle3-every-variant", True, False, 20, LONGEST),
]
IDS = [f"{name}, {overlapped}, {graphs}" for name, overlapped, graphs, *_ in ENGINES]
BORROWING = "p-eagle, False, False"  # its heads have the target's embeddings
SELECTING = Case(replace(CASES["p-eagle"].config, path_selector=SelectorConfig(8)))
# Engine -> the heads that take the place of that of its start, one after the other: each has
# weights of its own, and "" is the head of the start.
SWAPS: dict[str, list[Case | str]] = {
    "p-eagle, False, False": [SELECTING, ""],
    "p-eagle-draft-vocabulary, True, False": [CASES["p-eagle-draft-vocabulary"]],
    "p-eagle, True, True": [CASES["p-eagle"], ""],
    "selector-draft-vocabulary, True, True": [CASES["selector-draft-vocabulary"]],
    "eagle3-every-variant, True, False": [CASES["eagle3-every-variant"]],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(1)
    return Target(tmp_path_factory.mktemp("target"))


def _changed(case: Case, own: dict[str, bool]) -> Case:
    """The case with fewer positions than texts have tokens: drafts go on behind them."""
    return replace(case, own=own, config=replace(case.config, max_position_embeddings=32))


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Engine -> checkpoints of the head of its start and of each that takes its place."""
    folder = tmp_path_factory.mktemp("heads")
    found: dict[str, list[Path]] = {}
    for engine, (name, *_) in zip(IDS, ENGINES, strict=True):
        own = {"own_embeddings": engine != BORROWING}
        cases = [case and _changed(case, own) for case in (CASES[name], *SWAPS[engine])]
        found[engine] = save_heads(folder, engine, cases, target)
    return found


Steps = dict[str, list[list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def steps(
    target: Target, heads: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> Steps:
    """Engine -> what was drafted with each head in order."""
    engines = {
        engine: {
            "model": str(target.folder),
            "head": str(heads[engine][0]),
            "k": K,
            "speculation": {"num_speculative_tokens_per_batch_size": captured_table(K)},
            "block_size": 32,
            "async_scheduling": overlapped,
            "graphs": graphs,
            "max_num_batched_tokens": budget,
            "max_model_len": longest,
            "prompts": [list(range(5, 27 + n)) for n in range(9)] if graphs else 2 * PROMPTS,
            "swaps": swaps(heads[engine]),
        }
        for engine, (_, overlapped, graphs, budget, longest) in zip(IDS, ENGINES, strict=True)
    }
    folder = tmp_path_factory.mktemp("v2")
    # Some of two at a time end at K = 0, and the next ones get their slots.
    job = {
        "engines": engines,
        "max_tokens": 40,
        "swapped": {"prompts": PROMPTS, "max_tokens": 16},
    }
    result: Steps = engine_job.run(SCRIPT, folder, job, timeout=900)
    return result


def wrong(checkpoint: Path, target: Target, drafted: list[dict[str, Any]]) -> int:
    """How many of these steps have drafts that the torch module does not make."""
    head = target.lend(load_head(checkpoint))
    return sum(not agrees(head, target, step) for step in drafted)


@pytest.mark.parametrize("engine", IDS)
def test_no_draft_comes_from_a_stale_state(
    engine: str, target: Target, heads: dict[str, list[Path]], steps: Steps
) -> None:
    drafted = steps[engine][0]
    assert len({len(step["draft"]) for step in drafted}) == K
    assert wrong(heads[engine][0], target, drafted) == 0, f"of {len(drafted)}"


@pytest.mark.parametrize("engine", SWAPS)
def test_a_head_that_took_anothers_place_drafts(
    engine: str, target: Target, heads: dict[str, list[Path]], steps: Steps
) -> None:
    """From the first step on, and in graphs that were captured before."""
    for head, drafted in zip(heads[engine][1:], steps[engine][1:], strict=True):
        assert len(drafted) > 3
        assert wrong(head, target, drafted) == 0, f"{head.name}, of {len(drafted)}"
    if engine.endswith("True"):
        assert all(any(step["graph"] for step in drafted) for drafted in steps[engine])
    # Heads of one engine differ, else this would hold without a swap.
    assert wrong(heads[engine][0], target, steps[engine][1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to wait for")
def test_no_step_waits_for_the_device(steps: Steps) -> None:
    waited = {name: sum(step["waits"] for step in drafted[0]) for name, drafted in steps.items()}
    assert not any(waited.values()), waited


def test_graphs_are_taken_when_k_changes(steps: Steps) -> None:
    """P-EAGLE's; and a batch that ends, and the end of the longest context, have both been met."""
    for name, (drafted, *_) in steps.items():
        if CASES[name.partition(",")[0]].config.method != "p-eagle":
            continue
        graphs = {(step["graph"], len(step["draft"])) for step in drafted if step["graph"]}
        if not name.endswith("True"):
            assert torch.cuda.is_available() or not graphs
            continue
        captured = set(captured_ks(K)) - {0}
        assert {k for k, _ in graphs} == captured
        pairs = len(captured) * (len(captured) - 1) // 2
        assert sum(graph > k for graph, k in graphs) >= pairs / 2
        without = [step for step in drafted if not step["graph"]]
        assert len(without) < len(drafted) / 4
        assert any(len(step["text"]) > LONGEST - 2 * K for step in without)
        assert torch.cuda.is_available() or any(step["padded"] for step in drafted)
