"""The summary: counts of equal answers, ties and failures, and the interval of pass@1."""

from __future__ import annotations

from typing import Any

import pytest

from bench.quality.summary import summary, text, wilson


def side(outcome: str | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    return {"finish_reason": finish_reason} | ({"outcome": outcome} if outcome else {})


def parted(gap: float | None) -> dict[str, Any]:
    return {"position": 3, "with_drafts": 5, "without_drafts": 6, "gap": gap}


def cell(on: dict[str, Any], off: dict[str, Any], difference: Any = None) -> dict[str, Any]:
    return {"on": on, "off": off, "difference": difference}


def test_differences_are_ties_up_to_the_tolerance_and_failures_beyond() -> None:
    gaps = {"a": 0.0, "b": 0.25, "c": 0.2501, "d": None}
    cells = {(name,): cell(side(), side(), parted(gap)) for name, gap in gaps.items()}
    cells["e",] = cell(side(), side(finish_reason="length"))
    found = summary(cells, 0.25)
    assert (found["problems"], found["equal"], found["ties"], found["failures"]) == (5, 1, 2, 2)
    assert [item["tie"] for item in found["differing"]] == [True, True, False, False]
    assert found["cut_off"] == {"on": 0, "off": 1}
    assert "pass_at_1" not in found
    assert text(found).count("FAILURE") == 2


def test_pass_at_1_is_of_all_problems_on_each_side() -> None:
    cells = {
        ("a",): cell(side("passed"), side("passed")),
        ("b",): cell(side("wrong"), side("passed"), parted(0.1)),
        ("c",): cell(side("timeout"), side("timeout")),
    }
    found = summary(cells, 0.25)["pass_at_1"]
    assert found["on"]["value"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["off"]["value"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["on"]["outcomes"] == {"passed": 1, "timeout": 1, "wrong": 1}
    assert "pass@1 with drafts off: 66.7%" in text(summary(cells, 0.25))


def test_problems_that_pass_on_one_side_alone_are_counted_both_ways() -> None:
    """Equal shares on both sides may hide that drafts changed what passes."""
    sides = ["passed wrong", "passed timeout", "wrong passed", "passed passed", "wrong timeout"]
    pairs = [name.split() for name in sides]
    cells = {(str(n),): cell(side(on), side(off)) for n, (on, off) in enumerate(pairs)}
    found = summary(cells, 0.25)
    assert found["passed_once"] == {"on": 2, "off": 1}
    assert "passed with drafts alone: 2; without drafts alone: 1" in text(found)
    assert "passed_once" not in summary({("a",): cell(side(), side())}, 0.25)


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [
        (0, 10, (0.0, 0.2775)),
        (10, 10, (0.7225, 1.0)),
        (5, 10, (0.2366, 0.7634)),
        (41, 164, (0.1900, 0.3215)),
    ],
)
def test_intervals_are_wilsons(successes: int, trials: int, interval: tuple[float, float]) -> None:
    """Ends that solve (p - share)^2 = z^2 p (1 - p) / n, worked out by hand."""
    assert wilson(successes, trials) == pytest.approx(interval, abs=1e-4)
