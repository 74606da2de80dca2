"""What each K is predicted to make, with the drafter's reading of prompts."""

from __future__ import annotations

import pytest

from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import LATENCY, Objective
from drafters.control.policy import Load, count_draft_limits
from drafters.control.read_costs import ReadCosts
from drafters.control.tuning import Tuning


def calibrated(
    requests: int, draft_s: float = 0.001, accepted: tuple[int, ...] = (90, 80, 70)
) -> Controller:
    """Up to three draft tokens, `draft_s` each beside ten milliseconds of the target."""
    controller = Controller(3)
    controller.load_calibration(Cell(requests, k, 0.010 + draft_s * k, 50) for k in range(4))
    controller.acceptance.observe(100, (100,) * 3, accepted)
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


def test_all_prices_of_the_drafters_reading_are_one() -> None:
    """Catches: after a pause in the drafter, a probe that read a prompt is credited with twice what
    the target takes to read it."""
    costs = ReadCosts(Tuning())
    costs.target.observe(100, 0.020)
    load = Load(4, prefill_tokens=100)
    # Not measured: a guess would rule out K.
    assert costs.prompt_seconds(load, drafting=True) == pytest.approx(0.020)
    costs.drafter.observe(100, 2.0)
    assert costs.prompt_seconds(load, drafting=True) == pytest.approx(0.040)
    assert costs.measured_drafter_seconds_per_token == pytest.approx(200e-6)


def test_the_time_per_token_has_the_drafters_reading_too() -> None:
    """Four requests, and 40 prompt tokens in an average step. Catches: a K above 0 that holds the
    target only if its drafter reads those in no time, where it takes 7.2 ms a step."""
    controller = calibrated(4, draft_s=0.006, accepted=(60, 5, 0))
    controller._read_costs.target.observe(100, 0.020)
    controller._read_costs.drafter.observe(100, 0.018)
    controller._traffic.prompt_tokens = 40.0
    predictor = controller._predictor
    tpots = []
    for k, each in predictor.predict(Load(4), Objective(LATENCY, tpot_s=1e-6), 0).by_k.items():
        read_s = 40 * (380e-6 if k else 200e-6)
        tpots.append(4 * (each.seconds + read_s) / each.tokens)
        assert each.value == pytest.approx(1.0 / tpots[k])
    plain, one, *_ = predictor.predict(Load(4), Objective(LATENCY, tpot_s=0.0187), 0).by_k.values()
    assert 4 * (one.seconds + 40 * 200e-6) / one.tokens < 0.016 < tpots[0] < 0.0187 < tpots[1]
    assert one.value == 0.0 < plain.value


def test_a_pause_while_the_drafter_reads_forbids_no_drafts() -> None:
    """It took 20 ms for a token, which the target reads in 40 microseconds. Catches: a target that
    no K above 0 may hold again, so that none runs and the drafter's reading is never measured
    anew."""
    controller = calibrated(4)
    controller._read_costs.target.observe(100, 0.004)
    controller._read_costs.drafter.observe(100, 2.0)
    controller._traffic.prompt_tokens = 40.0
    objective = Objective(LATENCY, tpot_s=0.0117)  # K = 0 takes 11.6 ms
    plain, *drafts = controller._predictor.predict(Load(4), objective, 0).by_k.values()
    assert all(0.0 < plain.value < each.value for each in drafts)


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
