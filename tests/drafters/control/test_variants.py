"""Policies to compare, and how they take turns on one engine."""

from __future__ import annotations

import json
import math
from random import Random

import pytest

from drafters.control.objective import ObjectiveError
from drafters.control.variants import FULL, MECHANISMS, NAMES, SMALL, TURNS, policy
from tests.drafters.control.engines import SMOLLM2, calibration, engine

CELLS = calibration(SMOLLM2, 5, 16).cells


def made(name: str, *, grows: bool = False):  # type: ignore[no-untyped-def]
    found = policy(name, 5, rng=Random(0), catch_up_tokens=256, grows=grows)
    found.begin_with(CELLS)
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name != FULL])
def test_every_variant_runs_and_is_another_policy_than_the_full_one(name: str) -> None:
    found, full = made(name, grows=True), made(FULL, grows=True)
    assert type(found) is not type(full)
    for one in (found, full):
        engine(one, [(math.inf, 4)], hardware=SMOLLM2, output=50, asynchronous=False).run(steps=120)
    assert 0 <= found.snapshot()["k"] <= 5
    differs = {
        "growth": not found.grows and full.grows,
        "confidence": not found.doubts and full.doubts,
    }
    assert differs.get(name.removeprefix("without-"), True)


def test_an_unknown_policy_is_refused() -> None:
    for name in ("best", "without-sense"):
        with pytest.raises(ValueError, match="no policy"):
            made(name)


def test_every_mechanism_has_a_variant() -> None:
    assert {f"without-{mechanism}" for mechanism in MECHANISMS} < set(NAMES)


def test_each_policy_learns_in_its_own_turns_only() -> None:
    turns = made(TURNS)
    run = engine(turns, [(math.inf, 2)], hardware=SMOLLM2, output=50, asynchronous=False)
    seen = {}
    for name in (SMALL, FULL, "without-runs", SMALL):
        turns.steer(objective=f"policy:{name}")
        run.run(steps=run.totals.steps + 40)
        seen[name] = turns.snapshot()["acceptance"][0]["trials"]
    assert seen[SMALL] > seen[FULL] > 16.0, "it went on from where it was"
    assert turns.snapshot()["objective"] == "policy:small"


def test_a_pinned_k_teaches_none_of_them_and_counters_only_grow() -> None:
    turns = made(TURNS)
    run = engine(turns, [(math.inf, 2)], hardware=SMOLLM2, output=50, asynchronous=False)
    steps = [0]
    for changes in ({"objective": "policy:small"}, {"objective": "fixed", "k": 5},
                    {"objective": "off"}, {"objective": "policy:small"}):  # fmt: skip
        turns.steer(**changes)
        before = turns.snapshot()["acceptance"]
        run.run(steps=run.totals.steps + 40)
        steps.append(sum(turns.snapshot()["totals"]["steps"]))
        json.dumps(turns.snapshot(), allow_nan=False)
    assert steps == sorted(steps) and steps[-1] == run.totals.steps
    assert turns.snapshot()["acceptance"] != before
    assert turns.most == 5


@pytest.mark.parametrize("objective", ["policy:best", "speed"])
def test_a_wrong_turn_names_its_field(objective: str) -> None:
    turns = made(TURNS)
    with pytest.raises(ObjectiveError) as refused:
        turns.steer(objective=objective)
    assert refused.value.field == "objective"
