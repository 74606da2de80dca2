"""Objectives are checked when they are made, with errors that name the wrong field."""

from __future__ import annotations

from typing import Any

import pytest

from drafters.control.objective import Objective, ObjectiveError

FIXED, LATENCY = Objective("fixed", k=3), Objective("latency", tpot_s=0.02)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"objective": "fast"}, "objective"),
        ({"objective": "fixed"}, "k"),
        ({"objective": "fixed", "k": -1}, "k"),
        ({"objective": "fixed", "k": True}, "k"),
        ({"objective": "fixed", "k": 1.0}, "k"),
        ({"k": 3}, "k"),
        ({"objective": "off", "k": 0}, "k"),
        ({"objective": "latency"}, "tpot_s"),
        ({"objective": "latency", "tpot_s": 0.0}, "tpot_s"),
        ({"objective": "latency", "tpot_s": float("nan")}, "tpot_s"),
        ({"objective": "throughput", "tpot_s": 0.02}, "tpot_s"),
    ],
)
def test_nonsense_is_refused_by_field(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ObjectiveError) as caught:
        Objective(**fields)
    assert caught.value.field == wrong
    assert not caught.value.problem.startswith(wrong), "the field is told as data"


def test_a_k_beyond_the_largest_is_refused() -> None:
    assert FIXED.validated_for(3) is FIXED
    with pytest.raises(ObjectiveError) as caught:
        FIXED.validated_for(2)
    assert (caught.value.field, caught.value.problem) == ("k", "must be at most 2, not 3")


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        (Objective(), {"objective": "fixed", "k": 3}, FIXED),
        (FIXED, {"k": 2}, Objective("fixed", k=2)),
        (FIXED, {"objective": "fixed"}, FIXED),
        (FIXED, {"objective": "throughput", "k": None}, Objective()),
        (LATENCY, {"tpot_s": 0.5}, Objective("latency", tpot_s=0.5)),
        (LATENCY, {"objective": "off"}, Objective("off")),
    ],
)
def test_k_and_target_stay_while_the_name_does(
    before: Objective, changes: dict[str, Any], after: Objective
) -> None:
    assert before.changed(changes) == after


def test_sources_are_in_one_order_and_none_of_them_is_all() -> None:
    both = Objective(sources=["lookup", "head"])  # type: ignore[arg-type]  # as JSON has them
    assert both.sources == ("head", "lookup")
    assert Objective(sources=()) == Objective()
    assert both.changed({"objective": "off"}).changed({"objective": "throughput"}) == both
    assert both.changed({"sources": []}) == Objective()
    assert both.validated_for(3, ("head", "lookup")) is both
    with pytest.raises(ObjectiveError) as caught:
        both.validated_for(3, ("head",))
    assert (caught.value.field, caught.value.problem) == (
        "sources", "the engine has head, not lookup",
    )  # fmt: skip


@pytest.mark.parametrize(
    "objective", [Objective(), FIXED, LATENCY, Objective("off"), Objective(sources=("lookup",))]
)
def test_entries_make_the_same_objective_again(objective: Objective) -> None:
    assert Objective(**objective.entries()) == objective


@pytest.mark.parametrize("changes", [{"k": 3}, {"objective": "fixed"}, {"tpot_s": 1.0}])
def test_a_change_that_needs_another_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ObjectiveError):
        Objective().changed(changes)


def test_what_is_maximised_is_goodput_within_the_latency_and_else_the_reciprocal_of_tpot() -> None:
    goodput, tpots = [100.0, 150.0, 180.0], [0.01, 0.02, 0.04]
    assert Objective().values(goodput, tpots) == goodput
    assert Objective("latency", tpot_s=0.02).values(goodput, tpots) == [100.0, 150.0, 0.0]
    assert Objective("latency", tpot_s=0.005).values(goodput, tpots) == [100.0, 50.0, 25.0]
