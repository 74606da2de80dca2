"""The reason for K in words."""

from __future__ import annotations

from typing import Any

import pytest

from app.observability.k_reason import k_reason


def costs(steps: int = 4) -> list[dict[str, float]]:
    """Of K = 0, 1 and 3: some K may have no row."""
    rows = [(0, 0.012, 1.0, 83.0, 200), (1, 0.030, 1.5, 50.0, steps), (3, 0.042, 1.6, 38.0, 3)]
    names = ("k", "step_seconds", "step_tokens", "tokens_per_second", "steps_measured")
    return [dict(zip(names, row, strict=True)) for row in rows]


def state(**changes: Any) -> dict[str, Any]:
    base = {
        "objective": "throughput", "k": 0, "batch": 1, "costs": costs(),
        "waits_for_catch_up": False, "lookups": [], "available_sources": ["head", "lookup"],
        "sources": ["head", "lookup"],
    }  # fmt: skip
    return {"batch_k": changes.get("k", 0), **base, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            "off: at 1 request a step with 1 draft token takes 2.5 times as long and makes 1.5 "
            "times the tokens, measured in 4 steps",
        ),
        (
            {"k": 3, "batch": 8},
            "3 draft tokens: at 8 requests a step with 3 draft tokens takes 3.5 times as long and "
            "makes 1.6 times the tokens, without drafts measured in 200 steps",
        ),
        (
            {"costs": costs(0)},
            "off: at 1 request a step with 1 draft token takes 2.5 times as long and makes 1.5 "
            "times the tokens, estimated from other loads or K",
        ),
        (
            {"costs": costs(1), "waits_for_catch_up": True},
            "off: at 1 request a step with 1 draft token takes 2.5 times as long and makes 1.5 "
            "times the tokens, measured in 1 step; drafts start once they are sure to pay for what "
            "the drafter must read first",
        ),
        ({"costs": []}, "off: no step has been measured yet"),
        ({"costs": costs()[:1]}, "off: there is no head"),
        ({"sources": ["lookup"]}, "off: the head is not among the sources"),
        ({"objective": "off"}, "off: the objective is off"),
        ({"objective": "fixed", "k": 2}, "2 draft tokens: the objective is fixed"),
        ({"k": 3, "batch_k": 0}, "off: no request of the latest step may have drafts"),
    ],
)
def test_the_reason_says_what_was_compared_and_how_well_it_is_known(
    changes: dict[str, Any], said: str
) -> None:
    assert k_reason(state(**changes)) == said


def test_before_any_request_the_reason_is_that_of_one() -> None:
    assert "at 1 request a step" in k_reason(state(batch=0))


def test_what_lookups_bring_is_said_of_the_matches_seen_most() -> None:
    def row(match: int, tokens: float, trials: float) -> dict[str, float]:
        return {"match": match, "conditional": 0.5, "tokens": tokens, "trials": trials}

    rows = [row(2, 1.0, 40.0), row(7, 6.25, 90.0), row(16, 9.0, 0.0)]
    said = k_reason(state(lookups=rows))
    assert said == k_reason(state()) + "; a lookup with a match of 7 tokens brings 6.2 tokens"
    assert k_reason(state(lookups=rows[2:])) == k_reason(state())
    fixed = {"objective": "fixed", "k": 3}
    assert k_reason(state(lookups=rows, **fixed)) == k_reason(state(**fixed))
