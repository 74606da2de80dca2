"""Our speculator on vLLM's V2 model runner drafts what the torch module drafts, whatever K was in
the steps before, and whether or not a step is laid out before the one before it has run.

Random weights as in test_heads.py, and chance in place of the target's verdict. On a CPU all of the
runner's kernels run in Triton's interpreter, without CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.config import every_k
from drafters.model.checkpoint import load_head, save_head
from tests.drafters import engine_job
from tests.drafters.vllm.test_heads import CASES, PROMPTS, Target, agrees, new_head

pytest.importorskip("triton", reason="the V2 runner needs Triton, and this platform has none")
pytestmark = pytest.mark.slow

K = 5
SCRIPT = Path(__file__).with_name("engine_drafts_v2.py")
# Head, whether steps overlap, and the tokens of a step: 20 are fewer than the pass after a step of
# vLLM's warm-up would have.
ENGINES = [("p-eagle", False, 256), ("p-eagle-draft-vocabulary", True, 20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(1)
    return Target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> checkpoint."""
    folder = tmp_path_factory.mktemp("heads")
    for name in {name for name, *_ in ENGINES}:
        save_head(new_head(CASES[name], target), folder / name)
    return {name: folder / name for name, *_ in ENGINES}


@pytest.fixture(scope="module")
def steps(
    target: Target, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Head and way of scheduling -> what was drafted."""
    engines = {
        f"{name}, {overlapped}": {
            "model": str(target.folder),
            "block_size": 32,
            "async_scheduling": overlapped,
            "max_num_batched_tokens": budget,
            "speculative_config": {
                "method": "eagle3",
                "model": str(heads[name]),
                "num_speculative_tokens": K,
                "parallel_drafting": True,
                "num_speculative_tokens_per_batch_size": every_k(K),
            },
        }
        for name, overlapped, budget in ENGINES
    }
    folder = tmp_path_factory.mktemp("v2")
    # Some of two at a time end at K = 0, and the next ones get their slots.
    job = {"engines": engines, "prompts": 3 * PROMPTS, "max_tokens": 40}
    result: dict[str, list[dict[str, Any]]] = engine_job.run(SCRIPT, folder, job, timeout=280)
    return result


@pytest.mark.parametrize(("name", "overlapped"), [engine[:2] for engine in ENGINES])
def test_no_draft_comes_from_a_stale_state(
    name: str, overlapped: bool, target: Target, heads: dict[str, Path],
    steps: dict[str, list[dict[str, Any]]],
) -> None:  # fmt: skip
    head = target.lend(load_head(heads[name]))
    drafted = steps[f"{name}, {overlapped}"]
    assert len({len(step["draft"]) for step in drafted}) == K
    wrong = [step for step in drafted if not agrees(head, target, step)]
    assert not wrong, f"{len(wrong)} of {len(drafted)} steps"


def test_graphs_are_for_batches_that_pad_the_others_by_half_at_most() -> None:
    from drafters.vllm.v2.speculator import batches  # needs Triton

    assert batches(23) == [1, 2, 3, 4, 6, 8, 12, 16, 23]
    assert [batches(n) for n in (0, 1, 2)] == [[], [1], [1, 2]]
    for most in range(1, 300):
        sizes = batches(most)
        assert sizes[-1] == most
        assert all(min(s for s in sizes if s >= n) <= 1.5 * n for n in range(1, most + 1))
