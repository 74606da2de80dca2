"""After a long time at K = 0, acceptance is the same as if drafting had never stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from drafters.train.embedded import EMBEDDED
from drafters.train.embedded.tokenizer import load_tokenizer
from drafters.train.evaluation.workloads import held_out_prompts
from tests.drafters import engine_job

pytestmark = engine_job.marks()

STEPS = 96  # at K = 0 under load
SECONDS = float(os.environ.get("AERIE_BACK_OFF_S", "0"))  # more of them, for a long run
# Requests under load, and hidden states: requests that are further behind forget what came before.
LOAD, WINDOW = (48, 256) if SECONDS else (8, 64)
HEADS = ("p-eagle", "eagle3")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Head -> what was accepted in its engine."""
    prompts = held_out_prompts(load_tokenizer(EMBEDDED / "target"), 150)
    job = {
        "target": str(EMBEDDED / "target"),
        "heads": {name: str(EMBEDDED / name) for name in HEADS},
        "prompts": [p[:140] for pair in zip(*prompts.values(), strict=True) for p in pair],
        # A request lasts 1,700 steps: so many others that these take the time.
        "steps": STEPS, "seconds": SECONDS, "k": 5, "load": LOAD, "catch_up_tokens": WINDOW,
    }  # fmt: skip
    script = Path(__file__).parents[1] / "engine_back_off.py"
    return engine_job.run(script, tmp_path_factory.mktemp("back-off"), job, timeout=1700)


@pytest.mark.parametrize("head", HEADS)
def test_acceptance_returns_after_a_back_off(head: str, results: dict[str, Any]) -> None:
    result = results[head]
    print(json.dumps(result))
    for group in ("old", "met it", "new"):
        found = result[group]
        assert found["requests"] == 4
        assert found["steps"] > 60
        # The same tokens, drafted for by a head that has never been left out.
        assert found["length"] >= 0.95 * found["undisturbed"], group
    assert max(result["tokens_without"].values()) > WINDOW
