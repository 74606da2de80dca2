"""What each K is predicted to make, with the drafter's reading of prompts."""

from __future__ import annotations

import pytest

from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import LATENCY, Objective
from drafters.control.policy import Load, count_draft_limits


def calibrated(requests: int) -> Controller:
    """Up to three draft tokens, a millisecond each beside ten of the target."""
    controller = Controller(3)
    controller.load_calibration(Cell(requests, k, 0.010 + 0.001 * k, 50) for k in range(4))
    controller.acceptance.observe(100, (100,) * 3, (90, 80, 70))
    return controller


def test_a_drafter_that_reads_prompts_makes_less() -> None:
    """50 tokens are read for each that is made, in 20 microseconds each: a millisecond for each
    token of every K but 0, whose drafter reads nothing."""
    controller = calibrated(1)
    controller._read_costs.target.observe(100, 0.004)
    controller._read_costs.drafter.observe(100, 0.002)
    controller._traffic.prompt_tokens, controller._traffic.output_tokens = 500.0, 10.0
    for k, each in controller._predictor.predict(Load(1), Objective(), 0).by_k.items():
        reading = 0.001 * each.tokens if k else 0.0
        assert each.goodput == pytest.approx(each.tokens / (each.seconds + reading))
        assert (each.goodput < 0.95 * each.steady_tokens_per_second) == (k > 0)


def test_limits_make_steps_cheaper() -> None:
    """Requests with at most 1 and 3 draft tokens have four at K = 3: two each."""
    predictor = calibrated(2)._predictor
    limited = Load(2, requests_by_draft_limit=count_draft_limits([1, 3], 3))
    free, bound = (predictor.predict(load, Objective(), 0).by_k for load in (Load(2), limited))
    assert bound[3].seconds == free[2].seconds < free[3].seconds


def test_a_k_that_may_hold_the_target_is_worth_a_trial() -> None:
    """Beside a busy process K = 1 was measured at twice its time, above the target."""
    controller = Controller(1)
    controller.load_calibration([Cell(1, 0, 0.025, 5), Cell(1, 1, 0.060, 5)])
    objective = Objective(LATENCY, tpot_s=0.030)
    plain, drafts = controller._predictor.predict(Load(1), objective, 0).by_k.values()
    assert drafts.value == 0.0 < plain.value < drafts.optimistic_value


def test_the_prompt_of_one_step_is_no_reason_for_another_k() -> None:
    """The next sixteen steps do not read it."""
    controller = calibrated(1)
    controller._read_costs.target.observe(1000, 0.1)
    objective = Objective(LATENCY, tpot_s=0.008)
    with_prompt, without = (
        [each.value for each in controller._predictor.predict(load, objective, 0).by_k.values()]
        for load in (Load(1, prefill_tokens=1000), Load(1))
    )
    assert with_prompt == without
