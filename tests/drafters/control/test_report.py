"""The reason for K in words, and the rows of a snapshot."""

from __future__ import annotations

import pytest

from drafters.control.acceptance import Acceptance
from drafters.control.objective import Objective
from drafters.control.policy import Load, Step
from drafters.control.report import Row, Totals, acceptance_rows, cost_rows, why
from drafters.control.tuning import Tuning


def costs(steps: int = 4) -> list[Row]:
    """Of K = 0, 1, 2."""
    return cost_rows([0.012, 0.030, 0.042], [1.0, 1.5, 1.6], [83.0, 50.0, 38.0], [200, steps, 3])


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


def test_costs_are_by_k_from_zero() -> None:
    assert [row["k"] for row in costs()] == [0, 1, 2]
    assert costs()[2] == {
        "k": 2, "step_seconds": 0.042, "step_tokens": 1.6, "tokens_per_second": 38.0,
        "steps_measured": 3,
    }  # fmt: skip


def test_totals_are_by_k_and_position_and_cut_off_from_what_was_told() -> None:
    totals = Totals(2)
    totals.add(Step(Load(3, draft_tokens=6), 1, 0.5, 5, (3, 3), (2, 0), 0.3, 0.1), 0.9)
    told = totals.snapshot()
    totals.add(Step(Load(0, prefill_tokens=9), 0, 0.1, 0, (), ()), 0.1)
    assert told["steps"] == [0, 1, 0]
    assert (told["drafted"], told["accepted"]) == ([3, 3], [2, 0])
    assert (told["tokens"], told["decode_seconds"], told["plain_seconds"]) == (5, 0.5, 0.9)
    assert told["phases"] == pytest.approx(
        {"target": 0.3, "draft": 0.1, "control": 0.0, "other": 0.1}
    )
    assert totals.snapshot()["decode_seconds"] == 0.5, "a step without requests decodes nothing"


@pytest.mark.parametrize(
    ("objective", "k", "requests", "known", "waits", "said"),
    [
        (
            Objective(), 0, 1, costs(), False,
            "off: at 1 request a step with 1 draft takes 2.5 times as long and makes 1.5 times the "
            "tokens, measured in 4 steps",
        ),
        (
            Objective(), 2, 8, costs(), False,
            "2 drafts: at 8 requests a step with 2 drafts takes 3.5 times as long and makes 1.6 "
            "times the tokens, without drafts measured in 200 steps",
        ),
        (
            Objective(), 0, 1, costs(0), False,
            "off: at 1 request a step with 1 draft takes 2.5 times as long and makes 1.5 times the "
            "tokens, estimated from other loads",
        ),
        (
            Objective(), 0, 1, costs(1), True,
            "off: at 1 request a step with 1 draft takes 2.5 times as long and makes 1.5 times the "
            "tokens, measured in 1 step; drafts start once they are sure to pay for what the "
            "drafter must read first",
        ),
        (Objective(), 0, 1, [], False, "off: no step has been measured yet"),
        (Objective(), 0, 1, costs()[:1], False, "off: the largest K is 0"),
        (Objective("off"), 0, 1, costs(), False, "off: the objective is off"),
        (Objective("fixed", k=1), 1, 1, costs(), False, "1 draft: the objective is fixed"),
    ],
)  # fmt: skip
def test_the_reason_says_what_was_compared_and_how_well_it_is_known(
    objective: Objective, k: int, requests: int, known: list[Row], waits: bool, said: str
) -> None:
    assert why(objective, k, requests, known, waits) == said
