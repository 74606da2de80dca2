"""Our speculators on vLLM's V2 model runner draft what the torch module drafts, whatever K was in
the steps before, whether or not a step is scheduled before the last one has run, and P-EAGLE's in
CUDA graphs of another K and of more requests.

Weights are random as in test_heads.py, and drafts are accepted at random. On a CPU all of the
runner's kernels run in Triton's interpreter, and the calls that a graph would record are run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.config import captured_ks, captured_table
from drafters.model.checkpoint import load_head, save_head
from tests.drafters import engine_job
from tests.drafters.vllm.v1.test_heads import CASES, PROMPTS, Target, agrees, new_head

pytest.importorskip("triton", reason="the V2 runner needs Triton, and this platform has none")
pytestmark = pytest.mark.slow

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
    ("selector", False, False, 20, 128),
    ("eagle3", False, False, 256, 128),
    ("eagle3-every-variant", True, False, 20, LONGEST),
]


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


Steps = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def steps(
    target: Target, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Steps:
    """Head and way of scheduling -> what was drafted."""
    engines = {
        f"{name}, {overlapped}, {graphs}": {
            "model": str(target.folder),
            "block_size": 32,
            "async_scheduling": overlapped,
            "graphs": graphs,
            "max_num_batched_tokens": budget,
            "max_model_len": longest,
            "prompts": [list(range(5, 27 + n)) for n in range(9)] if graphs else 3 * PROMPTS,
            "speculative_config": {
                "method": "eagle3",
                "model": str(heads[name]),
                "num_speculative_tokens": K,
                "parallel_drafting": CASES[name].config.method == "p-eagle",
                "num_speculative_tokens_per_batch_size": captured_table(K),
            },
        }
        for name, overlapped, graphs, budget, longest in ENGINES
    }
    folder = tmp_path_factory.mktemp("v2")
    # Some of two at a time end at K = 0, and the next ones get their slots.
    job = {"engines": engines, "max_tokens": 40}
    result: Steps = engine_job.run(SCRIPT, folder, job, timeout=900)
    return result


@pytest.mark.parametrize(("name", "overlapped", "graphs"), [engine[:3] for engine in ENGINES])
def test_no_draft_comes_from_a_stale_state(
    name: str, overlapped: bool, graphs: bool, target: Target, heads: dict[str, Path], steps: Steps
) -> None:
    head = target.lend(load_head(heads[name]))
    drafted = steps[f"{name}, {overlapped}, {graphs}"]
    assert len({len(step["draft"]) for step in drafted}) == K
    wrong = [step for step in drafted if not agrees(head, target, step)]
    assert not wrong, f"{len(wrong)} of {len(drafted)} steps"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to wait for")
def test_no_step_waits_for_the_device(steps: Steps) -> None:
    waited = {name: sum(step["waits"] for step in drafted) for name, drafted in steps.items()}
    assert not any(waited.values()), waited


def test_graphs_are_taken_when_k_changes(steps: Steps) -> None:
    """P-EAGLE's; and a batch that ends, and the end of the longest context, have both been met."""
    for name, drafted in steps.items():
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
