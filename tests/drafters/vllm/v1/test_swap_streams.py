"""A swap under 16 running greedy requests changes no text, and what is drafted afterwards is
accepted about as often as if the new head had drafted from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.settings import load
from tests.drafters import engine_job
from tests.drafters.noised_head import noised

pytestmark = engine_job.marks()

SCRIPT = Path(__file__).parents[1] / "engine_swap_streams.py"
STREAMS, TOKENS = 16, 160


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Way of swapping -> what became of the 16 requests. The engine starts with a noised head."""
    embedded = load({}, {}, preset="embedded")
    target, head = Path(embedded.model.model), Path(str(embedded.speculation.drafter))
    folder = tmp_path_factory.mktemp("streams")
    worse = noised(head, folder / "worse", 0.6)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    plans = {
        "no swap": {"swaps": {}, "hole": False},
        "better from the start": {"swaps": {"0": str(head)}, "hole": False},
        "to the better": {"swaps": {"15": str(head)}, "hole": False},
        "there and back": {"swaps": {"10": str(head), "12": "", "20": str(head)}, "hole": False},
        "as a hole": {"swaps": {"15": str(head)}, "hole": True},
    }
    job = {
        "model": str(target),
        "head": str(worse),
        "prompts": [
            tokenizer.encode(f"Write a story about {number} birds and a river.\n" * 3).ids
            for number in range(STREAMS)
        ],
        "max_tokens": TOKENS,
        "runs": list(plans.values()),
    }
    found = engine_job.run(SCRIPT, folder, job, timeout=600)
    return dict(zip(plans, found, strict=True))


def share(run: dict[str, Any]) -> float:
    """The share of the drafts of the last phase that was accepted."""
    verified, accepted = run["phases"][-1]
    assert verified > 500
    return float(accepted / verified)


@pytest.mark.parametrize("way", ["to the better", "there and back", "as a hole"])
def test_texts_are_those_without_a_swap(way: str, runs: dict[str, dict[str, Any]]) -> None:
    assert not any("error" in answer for answer in runs[way]["answers"])
    assert [len(text) for text in runs[way]["texts"]] == STREAMS * [TOKENS]
    assert runs[way]["texts"] == runs["no swap"]["texts"]


def test_the_better_head_is_better(runs: dict[str, dict[str, Any]]) -> None:
    assert share(runs["better from the start"]) > 1.3 * share(runs["no swap"])


def test_what_the_old_head_wrote_does_little_harm(runs: dict[str, dict[str, Any]]) -> None:
    """Why keys and values are kept: a context that begins anew costs more."""
    for name, run in runs.items():
        print(f"{name}: {share(run):.3f} of {run['phases'][-1][0]}, {run['answers']}")
    assert share(runs["to the better"]) > 0.9 * share(runs["better from the start"])
