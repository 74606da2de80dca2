"""`aerie bench step`: times of parts without those that they call, and of phases."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.load.counters import Counters
from bench.parts import step
from bench.parts.step import Parts, by_phase, parts_table, timed_parts
from tests.clock import Clock


def test_a_part_has_its_own_time_without_that_of_those_it_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(step, "perf_counter", clock)

    def inner() -> None:
        clock.now += 0.05

    room = SimpleNamespace(inner=inner)

    def outer() -> str:
        clock.now += 0.02
        room.inner()
        room.inner()
        return "made"

    room.outer = outer
    parts = Parts()
    parts.time(room, "inner", "deep")
    parts.time(room, "outer", "shallow")
    assert room.outer() == "made"
    assert parts.seconds["deep"] == pytest.approx(0.10)
    assert parts.seconds["shallow"] == pytest.approx(0.02)


def test_what_raises_is_timed_and_still_raises() -> None:
    def fails() -> None:
        raise ValueError("no")

    room = SimpleNamespace(fails=fails)
    parts = Parts()
    parts.time(room, "fails", "part")
    with pytest.raises(ValueError, match="no"):
        room.fails()
    assert "part" in parts.seconds and not parts._inner


def test_all_that_is_timed_exists() -> None:
    """Catches: a method that has another name since, so that the bench fails after its engine has
    started."""
    pytest.importorskip("vllm")
    for owner, names, _ in timed_parts():
        for name in names.split():
            assert callable(getattr(owner, name)), name


def test_the_table_has_the_largest_part_first_and_shares_of_the_whole() -> None:
    cells = [
        {"k": 0, "c": 1, "steps": 10, "parts": {"scheduler": 0.01, "target model": 0.09}},
        {"k": 7, "c": 1, "steps": 10, "parts": {"target model": 0.06, "draft model": 0.04}},
    ]
    rows = parts_table(cells)
    assert rows[0] == ["part", "K=0, c=1", "K=7, c=1"]
    assert [row[0] for row in rows[1:]] == [
        "target model", "draft model", "scheduler", "all",
    ]  # fmt: skip
    assert rows[1][1:] == ["9.00 (90.0%)", "6.00 (60.0%)"]
    assert rows[2][1:] == ["0.00 (0.0%)", "4.00 (40.0%)"]
    assert rows[-1][1:] == ["10.00", "10.00"]


def test_steps_and_phases_are_what_the_counters_grew_by() -> None:
    def page(zero: int, seven: int, target: float, draft: float) -> Counters:
        return Counters.read("\n".join([
            "# TYPE aerie_steps_total counter",
            f'aerie_steps_total{{k="0"}} {zero}',
            f'aerie_steps_total{{k="7"}} {seven}',
            "aerie_steps_k_total 42.0",
            f'aerie_step_seconds_total{{phase="target"}} {target}',
            f'aerie_step_seconds_total{{phase="draft"}} {draft}',
        ]))  # fmt: skip

    steps, each = by_phase(page(4, 6, 0.5, 0.25).since(page(1, 1, 0.1, 0.05)))
    assert steps == 8
    assert each == pytest.approx({"target": 50.0, "draft": 25.0})
