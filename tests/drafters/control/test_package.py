"""The package's introduction and its page in the docs say what the code does."""

from __future__ import annotations

import doctest

import pytest

import drafters.control
from docs.choice_of_k import PAGE, page
from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import FIXED, Objective
from drafters.control.policy import Load, Step


def test_the_example_of_the_introduction_is_true() -> None:
    result = doctest.testmod(drafters.control)
    assert result.attempted > 5 and result.failed == 0


def test_the_page_on_the_choice_of_k_is_that_of_the_controller() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m docs.choice_of_k"


CAPTURED = (0, 1, 3, 7)


def known(ks: tuple[int, ...] | None = CAPTURED) -> Controller:
    """At one request: K = 3 is the best of those captured, K = 4 of all."""
    controller = Controller(7, ks=ks)
    seconds = (10.0, 10.5, 11.0, 11.5, 12.0, 15.0, 15.5, 16.0)
    controller.load_calibration(Cell(1, k, s / 1e3, 50) for k, s in enumerate(seconds))
    for _ in range(200):
        controller.acceptance.observe(100, (100,) * 7, (90, 80, 70, 60, 10, 1, 0))
    return controller


def test_only_the_captured_k_are_chosen() -> None:
    """Catches: K as an index of the captured ones; a K without a graph that is chosen or probed."""
    every, captured = known(None), known()
    every.choose(Load(1))
    assert every.snapshot()["k"] == 4
    chosen = set()
    drafts = 0
    for _ in range(3000):
        load = Load(1, draft_tokens=drafts)
        k = captured.choose(load)
        chosen.add(k)
        accepted = tuple(int(i < 3) for i in range(drafts))
        seconds = 0.010 + 0.0005 * drafts
        captured.observe(Step(load, k, seconds, 1 + sum(accepted), (1,) * drafts, accepted))
        drafts = k
    state = captured.snapshot()
    assert state["k"] == 3 and sum(state["probes"].values()) > 1
    assert chosen <= set(CAPTURED) and len(chosen) > 1
    assert [row["k"] for row in state["costs"]] == list(CAPTURED)
    assert sum(state["totals"]["steps"]) == sum(state["totals"]["steps"][k] for k in CAPTURED)


@pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 1), (2, 1), (4, 3), (6, 3), (7, 7)])
def test_a_fixed_k_without_graphs_is_the_next_smaller_one(asked: int, taken: int) -> None:
    """Catches: steps that run without CUDA graphs for as long as the objective is in force."""
    controller = known()
    controller.set_objective(Objective(FIXED, k=asked))
    assert controller.choose(Load(1)) == controller.k_limit == taken
    controller.set_objective(Objective())
    assert controller.snapshot()["k"] == taken


def test_a_step_between_captured_k_counts_for_the_larger_one() -> None:
    """Its graph runs it. Catches: a step of two draft tokens that teaches K = 1 or nothing."""
    controller = known()
    controller.set_objective(Objective(FIXED, k=3))
    assert controller.choose(Load(1)) == 3
    before = {k: cost.seconds for k, cost in controller.costs.row(1).items()}
    for _ in range(100):
        controller.observe(Step(Load(1, draft_tokens=2), 3, 0.0125, 3, (1, 1), (1, 1)))
    after = {k: cost.seconds for k, cost in controller.costs.row(1).items()}
    assert after[3] == pytest.approx(0.0125, rel=0.02)
    assert after[1] / after[0] == pytest.approx(before[1] / before[0])
    assert after[3] / after[0] > 1.05 * before[3] / before[0]


def test_calibrated_cells_of_other_k_teach_nothing() -> None:
    """Catches: steps that ran without CUDA graphs taken for those of a K that has some."""
    cells = [Cell(1, 0, 0.010, 4), Cell(1, 5, 0.015, 4)]
    controller, other = Controller(9, ks=(0, 1, 5, 9)), Controller(9, ks=(0, 1, 5, 9))
    controller.load_calibration([*cells, Cell(1, 4, 0.030, 4), Cell(1, 12, 0.1, 4)])
    other.load_calibration(cells)
    assert controller.costs.row(1) == other.costs.row(1)
    assert controller.costs.steps(1, 5) == 4


@pytest.mark.parametrize(
    "ks", [(), (0,), (1, 7), (-1, 0, 7), (0, 3), (0, 3, 3, 7), (0, 7, 3), (0, 9)]
)
def test_captured_k_that_make_no_sense_are_refused(ks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ks must rise from 0 to 7"):
        Controller(7, ks=ks)
