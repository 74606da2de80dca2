"""The rows and sums of a snapshot."""

from __future__ import annotations

import pytest

from drafters.config import HEAD
from drafters.control.acceptance import Acceptance
from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import FIXED, OFF, Objective
from drafters.control.policy import Load, Match, SourceCounts, Span, Step
from drafters.control.predictions import KPrediction
from drafters.control.report import (
    ADDED_UP,
    Totals,
    acceptance_rows,
    cost_rows,
    of_all_copies,
)
from drafters.control.tuning import Tuning


def test_positions_are_counted_from_one() -> None:
    """Catches: the position in a snapshot shifted by one."""
    acceptance = Acceptance(2, Tuning())
    for _ in range(500):
        acceptance.observe(100, (100, 100), (90, 45))
    first, second = acceptance_rows(acceptance)
    assert (first["position"], second["position"]) == (1, 2)
    assert first["conditional"] == first["cumulative"] == pytest.approx(0.9, abs=0.01)
    assert second["conditional"] == pytest.approx(0.5, abs=0.01)
    assert second["cumulative"] == pytest.approx(0.45, abs=0.01)
    assert first["trials"] > second["trials"] > 0


def test_what_is_only_assumed_has_no_trials() -> None:
    """Catches: priors told as observations, also of lookups and spans."""
    policy = Controller(5, lookup_tokens=10, span_tokens=10)
    state = policy.snapshot()
    rows = [*state["acceptance"], *state["lookups"], state["spans"]]
    assert len(rows) > 10 and not any(row["trials"] for row in rows)
    matches, spans = (Match(2, 1, 0),), (Span(1, 0),)
    step = Step(Load(1, draft_tokens=1), 1, 0.01, 1, (1,), (0,), matches=matches, spans=spans)
    policy.choose(step.load)
    policy.observe(step)
    state = policy.snapshot()
    rows = [state["acceptance"][0], state["lookups"][0], state["spans"]]
    assert all(row["trials"] for row in rows) and not state["acceptance"][1]["trials"]


def test_costs_are_by_k() -> None:
    """Catches: rows that are numbered and not named by their K."""
    predictions = [
        KPrediction(
            k, seconds=0.01 * (k + 1), variance=0.1, tokens=1.0 + k, goodput=50.0, value=7.0,
            optimistic_value=9.0, times_as_good=1.3,
        )
        for k in (0, 3)
    ]  # fmt: skip
    rows = cost_rows(predictions, lambda k: 10 * k)
    assert [row["k"] for row in rows] == [0, 3]
    assert rows[1] == {
        "k": 3, "step_seconds": 0.04, "step_tokens": 4.0, "tokens_per_second": 50.0,
        "steps_measured": 30,
    }  # fmt: skip


def test_totals_are_by_k_and_position_and_cut_off_from_what_was_told() -> None:
    totals = Totals(2, HEAD)
    totals.add(Step(Load(3, draft_tokens=6), 1, 0.5, 5, (3, 3), (2, 0), 0.3, 0.1), 0.5, 0.9)
    told = totals.snapshot()
    totals.add(Step(Load(0, prefill_tokens=9), 0, 0.1, 0, (), ()), 0.0, 0.0)
    assert told["steps"] == [0, 1, 0]
    assert (told["drafted"], told["accepted"]) == ([3, 3], [2, 0])
    assert (told["tokens"], told["decode_seconds"], told["plain_seconds"]) == (5, 0.5, 0.9)
    assert told["phases"] == pytest.approx(
        {"target": 0.3, "draft": 0.1, "control": 0.0, "other": 0.1}
    )
    later = totals.snapshot()
    assert (later["decode_seconds"], later["plain_seconds"]) == (0.5, 0.9)


@pytest.mark.parametrize(("chunks", "last"), [(0, 2000), (3, 1900), (7, 1600)])
def test_the_speed_up_pays_for_the_drafter_to_read_long_prompts(chunks: int, last: int) -> None:
    """One user, whose prompts are read in `chunks` of 2,048 tokens and a last one. Catches: all but
    the last chunk free for the drafter, as these steps make no tokens: 1.36 instead of 1.08."""

    def decoded(k: int) -> tuple[dict[str, float], float]:
        """The totals of 30 answers, and the true seconds of them, but for the target's reading in
        steps that make no tokens, which is the same at every K."""
        policy = Controller(3, objective=Objective(FIXED, k=3) if k else Objective(OFF))
        policy.load_calibration([Cell(1, 0, 0.0232, 100), Cell(1, 3, 0.0270, 100)])
        seconds, drafter_s, target_s = 0.0, 5.2e-5, 6.5e-4
        for _ in range(30):
            for chunk in range(chunks + 1):
                ends = int(chunk == chunks)
                tokens = last if ends else 2048
                reading_s = drafter_s * tokens if k else 0.0
                step_s = target_s * tokens + reading_s + ends * (0.024 if k else 0.0214)
                load = Load(ends, prefill_tokens=tokens - ends)
                policy.choose(load)
                policy.observe(Step(load, k, step_s, ends, (), (), draft_seconds=reading_s))
                seconds += step_s if ends else reading_s
            for _ in range(50 if k else 100):
                load = Load(1, draft_tokens=k, context_tokens=16_000)
                policy.choose(load)
                step_s = 0.0270 if k else 0.0232
                policy.observe(Step(load, k, step_s, 2 if k else 1, (1,) * k, (1, 0, 0)[:k]))
                seconds += step_s
        return policy.snapshot()["totals"], seconds

    totals, drafting_s = decoded(3)
    plain_s = decoded(0)[1]
    speed_up = totals["plain_seconds"] / totals["decode_seconds"]
    assert speed_up == pytest.approx(plain_s / drafting_s, rel=0.05)


def test_totals_are_by_source_too() -> None:
    """Catches: drafts of a lookup among the head's, which have positions."""
    totals = Totals(2, HEAD)
    lookup = SourceCounts("lookup", (2, 2, 1), (1, 1, 0))
    totals.add(Step(Load(3), 1, 0.5, 5, (3, 3), (2, 0), others=(lookup,)), 0.5, 0.9)
    told = totals.snapshot()
    assert (told["drafted"], told["accepted"]) == ([3, 3], [2, 0])
    assert told["sources"] == {
        "head": {"drafted": 6, "accepted": 2},
        "lookup": {"drafted": 5, "accepted": 2},
        "grammar": {"drafted": 0, "accepted": 0},
    }


def test_what_copies_count_adds_up_and_what_they_believe_does_not() -> None:
    """Catches: a counter of some copies alone, and an estimate or a K that is added up."""
    copies = [Controller(3), Controller(3)]
    for policy, times in zip(copies, (1, 3), strict=True):
        for _ in range(times):
            load = Load(2, draft_tokens=4)
            policy.choose(load)
            policy.observe(Step(load, 2, 0.5, 5, (2, 2), (1, 0), 0.3, 0.1))
    first, second = (policy.snapshot() | {"requests": 2, "waiting": 1} for policy in copies)
    state = of_all_copies([first, second])
    assert state["totals"]["steps"] == [0, 0, 4, 0]
    assert state["totals"]["sources"]["head"] == {"drafted": 16, "accepted": 4}
    assert state["totals"]["phases"]["target"] == pytest.approx(4 * 0.3)
    assert (state["requests"], state["waiting"]) == (4, 2)
    assert state["probes"].keys() == first["probes"].keys()
    believed = first.keys() - set(ADDED_UP)
    assert {name: state[name] for name in believed} == {name: first[name] for name in believed}
    assert of_all_copies([first]) == first
    steps = {"steps": [{"seconds": 0.1}]}
    assert of_all_copies([steps, {"steps": []}]) == steps, "the newest steps are one copy's"
