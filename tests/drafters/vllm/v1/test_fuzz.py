"""A request's text does not depend on random K, arrivals, aborts and preemptions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from drafters.train.embedded import EMBEDDED
from tests.drafters import engine_job

pytestmark = engine_job.marks()

SCRIPT = Path(__file__).parents[1] / "engine_fuzz.py"
# 2,000 steps take ten minutes; what a short run can miss, a long one is for.
STEPS = int(os.environ.get("AERIE_FUZZ_STEPS", "200"))
TIE = 1e-3  # in log-probability: float32 sums of other batch shapes differ by less
HEADS = ("p-eagle", "eagle3")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Head -> what happened in its engine."""
    heads = {name: str(EMBEDDED / name) for name in HEADS}
    target = str(EMBEDDED / "target")
    job = {"target": target, "heads": heads, "steps": STEPS, "seed": STEPS, "k_max": 11}
    return engine_job.run(SCRIPT, tmp_path_factory.mktemp("fuzz"), job, timeout=1700)


@pytest.mark.parametrize("head", HEADS)
def test_text_is_the_same_as_without_speculation(head: str, results: dict[str, Any]) -> None:
    result = results[head]
    print({name: value for name, value in result.items() if name != "different"})
    apart = [one for one in result["different"] if one["gap"] is None or one["gap"] > TIE]
    assert not apart
    assert len(result["different"]) <= result["finished"] / 20  # ties are rare
    # The run met what it is about.
    assert result["steps"] >= STEPS / 2  # until all requests have ended
    assert result["finished"] >= STEPS / 10
    assert result["aborted"] and result["preempted"]
    assert result["accepted"] and result["lookups"] and result["skipped"]
    assert len(result["ks"]) == 12 or STEPS < 1000
    assert result["ks"]["0"] and len(result["ks"]) > 4
