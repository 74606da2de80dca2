"""Start-up measurements: their order and their budget."""

from __future__ import annotations

import pytest

from app.engine.calibration import calibrate, plan
from drafters.config import captured_ks
from drafters.control.cost_table import Cell


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


def run(machine: Machine, budget_s: float = 10.0) -> tuple[Cell, ...]:
    return calibrate(machine.measure, machine.clock, k_max=7, max_requests=64, budget_s=budget_s)


def test_the_corners_come_first_and_every_cell_once() -> None:
    cells = list(plan(k_max=7, max_requests=48))
    assert cells[:4] == [(1, 0), (48, 0), (1, 7), (48, 7)]
    assert sorted(cells) == sorted((n, k) for n in (1, 4, 16, 48) for k in (0, 1, 3, 7))


@pytest.mark.parametrize(("k_max", "most"), [(1, 1), (1, 256), (2, 2), (11, 1)])
def test_small_ranges_have_no_cell_twice(k_max: int, most: int) -> None:
    cells = list(plan(k_max, most))
    assert {k for _, k in cells} <= set(captured_ks(k_max)), "an engine with graphs takes no other"
    assert len(cells) == len(set(cells))
    assert {(1, 0), (most, k_max)} <= set(cells)
    assert all(1 <= n <= most and 0 <= k <= k_max for n, k in cells)


def test_it_ends_within_its_budget_and_takes_the_median() -> None:
    machine = Machine(0.5)  # 1.5 s a cell
    found = run(machine)
    assert machine.now - 100.0 <= 10.0
    cheap = [cell for cell in plan(7, 64) if cell != (64, 7)]
    assert machine.measured == cheap[:6]
    assert {cell.seconds for cell in found} == {0.5}


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
    assert len(run(machine)) == 1
