"""Start-up measurements: their order, their budget, and whose file is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafters.control.calibration import Calibration, CalibrationError, Cell, plan
from drafters.control.cost_table import CostTable
from drafters.control.tuning import Tuning

HERE = {"hardware": "NVIDIA B200", "model": "target", "head": "head-1", "vllm": "0.32.0"}


class Machine:
    """A clock that measuring moves."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.measured = 100.0, seconds, list[tuple[int, int]]()

    def clock(self) -> float:
        return self.now

    def measure(self, requests: int, k: int) -> list[float]:
        self.measured.append((requests, k))
        self.now += self.seconds * 3
        return [self.seconds, 20 * self.seconds, self.seconds]  # one is a pause


def run(machine: Machine, budget_s: float = 10.0) -> Calibration:
    return Calibration.run(
        machine.measure, machine.clock, k_max=7, max_requests=64, fingerprint=HERE,
        budget_s=budget_s,
    )  # fmt: skip


def test_the_corners_come_first_and_every_cell_once() -> None:
    cells = list(plan(k_max=7, max_requests=48))
    assert cells[:4] == [(1, 0), (48, 0), (1, 7), (48, 7)]
    assert sorted(cells) == sorted((n, k) for n in (1, 4, 16, 48) for k in (0, 1, 3, 7))


@pytest.mark.parametrize(("k_max", "most"), [(1, 1), (1, 256), (2, 2), (11, 1)])
def test_small_ranges_have_no_cell_twice(k_max: int, most: int) -> None:
    cells = list(plan(k_max, most))
    assert len(cells) == len(set(cells))
    assert {(1, 0), (most, k_max)} <= set(cells)
    assert all(1 <= n <= most and 0 <= k <= k_max for n, k in cells)


def test_it_ends_within_its_budget_and_takes_the_median() -> None:
    machine = Machine(0.5)  # 1.5 s a cell
    found = run(machine)
    assert machine.now - 100.0 <= 10.0
    cheap = [cell for cell in plan(7, 64) if cell != (64, 7)]
    assert machine.measured == cheap[:6]
    assert {cell.seconds for cell in found.cells} == {0.5}


def test_a_corner_that_nobody_will_use_does_not_eat_the_budget() -> None:
    """As on two cores: 64 requests with 7 drafts take half a second a step."""

    class InProportion(Machine):
        def measure(self, requests: int, k: int) -> list[float]:
            self.seconds = 0.02 + 0.001 * requests * (1 + k)
            return super().measure(requests, k)

    machine = InProportion(0.0)
    run(machine, budget_s=5.0)
    assert (64, 7) not in machine.measured
    assert {(64, 0), (16, 7), (64, 1), (1, 3)} <= set(machine.measured)
    assert machine.now - 100.0 <= 5.0


def test_a_cell_slower_than_the_budget_is_the_only_one() -> None:
    machine = Machine(60.0)
    assert len(run(machine).cells) == 1


def test_saved_and_read_it_is_the_same(tmp_path: Path) -> None:
    found = run(Machine(0.01))
    found.save(tmp_path / "costs.json")
    assert Calibration.read(tmp_path / "costs.json", HERE) == found


def test_another_machine_or_head_is_refused_by_name(tmp_path: Path) -> None:
    run(Machine(0.01)).save(tmp_path / "costs.json")
    other = {**HERE, "hardware": "NVIDIA H200", "head": "head-2"}
    with pytest.raises(CalibrationError) as caught:
        Calibration.read(tmp_path / "costs.json", other)
    assert "hardware is 'NVIDIA H200' and was 'NVIDIA B200'" in str(caught.value)
    assert "head is 'head-2' and was 'head-1'" in str(caught.value)
    assert "model" not in str(caught.value)


@pytest.mark.parametrize("fingerprint", [{}, {**HERE, "dtype": "float32"}])
def test_a_missing_or_additional_fact_is_a_mismatch(
    tmp_path: Path, fingerprint: dict[str, str]
) -> None:
    run(Machine(0.01)).save(tmp_path / "costs.json")
    with pytest.raises(CalibrationError, match="something else"):
        Calibration.read(tmp_path / "costs.json", fingerprint)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": 0, "fingerprint": HERE, "cells": [[1, 0, 0, 0.1, 5]]}),
        json.dumps({"format": 1, "fingerprint": HERE, "cells": []}),
        json.dumps({"format": 1, "fingerprint": HERE, "cells": [[1, 0, 0, 0.0, 5]]}),
        json.dumps({"format": 1, "fingerprint": HERE, "cells": [[1, 0, 0, 0.1]]}),
        json.dumps({"format": 1, "fingerprint": HERE, "cells": [["1", 0, 0, 0.1, 5]]}),
        json.dumps({"format": 1, "fingerprint": [], "cells": [[1, 0, 0, 0.1, 5]]}),
        '{"format": 1, "fingerprint": {}, "cells": [[1, 0, 0, NaN, 5]]}',
        '{"format": 1, "fingerprint": {}, "cells": [[1, 0, 0, Infinity, 5]]}',
        '{"format": 1, "fingerprint": {}, "cells": [[1, 0.5, 0, 0.1, 5]]}',
    ],
)
def test_a_damaged_file_is_refused_and_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(CalibrationError, match=r"costs\.json"):
        Calibration.read(file, {})


def test_a_missing_file_is_refused_and_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"none\.json"):
        Calibration.read(tmp_path / "none.json", HERE)


def test_cells_are_cut_off_from_their_source() -> None:
    """A controller learns in its cells; two of them must not learn in the same ones."""
    found = Calibration(HERE, (Cell(1, 0, 0.0, 0.1),))
    table = CostTable(1, Tuning(), lambda: 0.0)
    table.load(found.cells)
    table.observe(1, 0, 0.2)
    assert found.cells[0].seconds == 0.1
