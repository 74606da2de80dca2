"""Where the time of a step goes."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from bench.step import Parts, _page, parts_table


def test_a_part_has_its_own_time_without_that_of_those_it_calls() -> None:
    def inner() -> None:
        time.sleep(0.05)

    room = SimpleNamespace(inner=inner)

    def outer() -> str:
        time.sleep(0.02)
        room.inner()
        room.inner()
        return "made"

    room.outer = outer
    parts = Parts()
    parts.time(room, "inner", "deep")
    parts.time(room, "outer", "shallow")
    assert room.outer() == "made"
    assert parts.seconds["deep"] == pytest.approx(0.10, abs=0.04)
    assert parts.seconds["shallow"] == pytest.approx(0.02, abs=0.04)
    assert parts.seconds["shallow"] < parts.seconds["deep"]


def test_what_raises_is_timed_and_still_raises() -> None:
    def fails() -> None:
        raise ValueError("no")

    room = SimpleNamespace(fails=fails)
    parts = Parts()
    parts.time(room, "fails", "part")
    with pytest.raises(ValueError, match="no"):
        room.fails()
    assert "part" in parts.seconds and not parts._inner


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


def test_steps_and_phases_are_read_from_the_page() -> None:
    page = "\n".join([
        "# TYPE aerie_steps_total counter",
        'aerie_steps_total{k="0"} 4.0',
        'aerie_steps_total{k="7"} 6.0',
        "aerie_steps_k_total 42.0",
        'aerie_step_seconds_total{phase="target"} 0.5',
        'aerie_step_seconds_total{phase="draft"} 0.25',
    ])  # fmt: skip

    class Client:
        async def text(self, path: str) -> str:
            assert path == "/metrics"
            return page

    found = asyncio.run(_page(Client()))
    assert found == {"steps": 10.0, "target": 0.5, "draft": 0.25}
