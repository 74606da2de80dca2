"""The reason for K in words, and the rows of a snapshot."""

from __future__ import annotations

import pytest

from drafters.control.objective import Objective
from drafters.control.report import Beliefs, acceptance_rows, why


def beliefs(steps: float = 4, age_s: float = 3000.0, requests: int = 1) -> Beliefs:
    return Beliefs(
        requests, [0.012, 0.030, 0.042], [1.0, 1.5, 1.6], [83.0, 50.0, 38.0], [200, steps, steps],
        [0.0, age_s, age_s],
    )  # fmt: skip


def test_positions_are_counted_from_one() -> None:
    """Catches: the position in a snapshot shifted by one."""
    rows = acceptance_rows([0.9, 0.5], [0.9, 0.45], [100.0, 90.0])
    assert rows == [
        {"position": 1, "conditional": 0.9, "cumulative": 0.9, "trials": 100.0},
        {"position": 2, "conditional": 0.5, "cumulative": 0.45, "trials": 90.0},
    ]


@pytest.mark.parametrize(
    ("objective", "k", "known", "waits", "said"),
    [
        (
            Objective(), 0, beliefs(), False,
            "off: at 1 request a step with 1 draft takes 2.5 times as long and makes 1.5 times the "
            "tokens, measured in 4 steps, the last 50 minutes ago",
        ),
        (
            Objective(), 2, beliefs(requests=8), False,
            "2 drafts: at 8 requests a step with 2 drafts takes 3.5 times as long and makes 1.6 "
            "times the tokens, without drafts measured in 200 steps, the last just now",
        ),
        (
            Objective(), 0, beliefs(steps=0), False,
            "off: at 1 request a step with 1 draft takes 2.5 times as long and makes 1.5 times the "
            "tokens, estimated from other loads",
        ),
        (
            Objective(), 0, beliefs(1, 7200.0), True,
            "off: at 1 request a step with 1 draft takes 2.5 times as long and makes 1.5 times the "
            "tokens, measured in 1 step, the last 2 hours ago; drafts start once they are sure to "
            "pay for what the drafter must read first",
        ),
        (Objective(), 0, None, False, "off: no step has been measured yet"),
        (Objective("off"), 0, beliefs(), False, "off: the objective is off"),
        (Objective("fixed", k=1), 1, beliefs(), False, "1 draft: the objective is fixed"),
    ],
)  # fmt: skip
def test_the_reason_says_what_was_compared_and_how_well_it_is_known(
    objective: Objective, k: int, known: Beliefs | None, waits: bool, said: str
) -> None:
    assert why(objective, k, known, waits=waits) == said
