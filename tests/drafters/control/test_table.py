"""Costs learned from steps: shape, corrections, pauses, slowdowns."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.control.cost import Cell, CostModel
from drafters.control.simulate.hardware import Hardware
from drafters.control.table import CostTable, bucket_of
from tests.drafters.control.engines import CPU, calibration

MIXTURE = Hardware(
    base=2e-3, request=4e-5, experts=2e-3, touched=0.125, token=4e-6, drafter=1e-3,
    drafter_token=1.5e-5,
)  # fmt: skip


@pytest.mark.parametrize("hardware", [CPU, MIXTURE], ids=["linear", "mixture"])
def test_calibrated_at_a_few_batches_it_knows_those_between(hardware: Hardware) -> None:
    table = CostTable(7)
    table.load(calibration(hardware, 7).cells)
    for requests in (2, 3, 7, 10, 24, 40):
        truth = [hardware.steady(requests, k) for k in range(8)]
        assert table.row(requests, 0) == pytest.approx(truth, rel=0.1)


def test_steps_correct_what_the_terms_cannot_express() -> None:
    """A cell that is 60% slower than any smooth cost: 17 rows fall out of a fast kernel."""
    table = CostTable(7)
    table.load(calibration(CPU, 7).cells)
    odd = 1.6 * CPU.steady(16, 3)
    for _ in range(1000):
        table.observe(16, 3, 0, odd)
        table.observe(16, 0, 0, CPU.steady(16, 0))
    row = table.row(16, 0)
    assert row[3] == pytest.approx(odd, rel=0.03)
    assert row[0] == pytest.approx(CPU.steady(16, 0), rel=0.03)
    # Other batches and other K hear a third of it at most.
    assert table.row(48, 0)[3] == pytest.approx(CPU.steady(48, 3), rel=0.2)
    assert row[7] == pytest.approx(CPU.steady(16, 7), rel=0.2)


def test_a_pause_does_not_poison_it() -> None:
    table = CostTable(7)
    for _ in range(100):
        table.observe(4, 3, 0, CPU.steady(4, 3))
    table.observe(4, 3, 0, 20 * CPU.steady(4, 3))
    assert table.row(4, 0)[3] == pytest.approx(CPU.steady(4, 3), rel=0.06)  # a mean: +19% at least
    for _ in range(30):
        table.observe(4, 3, 0, CPU.steady(4, 3))
    assert table.row(4, 0)[3] == pytest.approx(CPU.steady(4, 3), rel=0.02)


def test_a_pause_in_the_first_step_of_a_cell_does_not_poison_it_either() -> None:
    table = CostTable(7)
    table.load(calibration(CPU, 7).cells)
    table.observe(8, 5, 0, 20 * CPU.steady(8, 5))
    assert table.row(8, 0)[5] < 1.6 * CPU.steady(8, 5)


def test_a_machine_that_slows_down_is_not_held_against_one_k() -> None:
    table = CostTable(7)
    table.load(calibration(CPU, 7).cells)
    for _ in range(100):
        table.observe(4, 4, 0, CPU.steady(4, 4))
    before = table.row(4, 0)
    for _ in range(100):
        table.observe(4, 4, 0, 1.5 * CPU.steady(4, 4))
    after = table.row(4, 0)
    assert after[4] == pytest.approx(1.5 * CPU.steady(4, 4), rel=0.05)
    # K = 0 was not measured again, and is believed to have slowed down as well.
    assert after[0] / before[0] == pytest.approx(1.5, rel=0.2)


def test_drafts_that_cost_more_than_thought_tell_little_of_plain_steps() -> None:
    """Or a burst tries one K after another, and never the one that was known to be good."""
    table = CostTable(7)
    table.load(calibration(CPU, 7).cells)
    before = table.row(32, 0)
    for k in range(1, 8):
        for _ in range(6):
            table.observe(32, k, 0, 2.5 * CPU.steady(32, k))
    after = table.row(32, 0)
    assert after[0] < 1.3 * before[0]  # the rest is a slower machine, as far as anybody knows
    for k in range(1, 8):
        assert after[k] / after[0] > 1.8 * CPU.steady(32, k) / CPU.steady(32, 0)


def test_a_lasting_change_is_learned() -> None:
    table = CostTable(7)
    for _ in range(500):
        table.observe(4, 4, 0, CPU.steady(4, 4))
    for _ in range(300):
        table.observe(4, 4, 0, 5 * CPU.steady(4, 4))
    assert table.row(4, 0)[4] == pytest.approx(5 * CPU.steady(4, 4), rel=0.05)


def test_slow_steps_after_each_change_do_not_make_what_is_never_visited_look_cheap() -> None:
    """A cell takes the first steps of a visit for its own, so that those after them look fast."""
    table = CostTable(7)
    table.load(calibration(CPU, 7).cells)
    for _ in range(60):
        for requests, k in ((2, 0), (2, 1), (2, 5)):
            for step in range(150):
                slow = 1.2 if step < 8 else 1.0
                table.observe(requests, k, 0, slow * CPU.steady(requests, k))
    assert table.seconds(64, 0, 0) == pytest.approx(CPU.steady(64, 0), rel=0.15)
    assert table.seconds(2, 5, 0) == pytest.approx(CPU.steady(2, 5), rel=0.05)


def test_a_k_that_is_hardly_known_tells_little_of_the_machine() -> None:
    """Its first steps, while caches fill, are slow; that those after them are not is no speed-up
    of the machine, and nothing that plain steps would have of it."""
    table = CostTable(5)
    for _ in range(200):
        for k in (0, 1, 5):
            table.observe(32, k, 0, CPU.steady(32, k))
    for step in range(60):
        table.observe(32, 3, 0, (1.3 if step < 10 else 1.0) * CPU.steady(32, 3))
    assert table.seconds(32, 3, 0) == pytest.approx(CPU.steady(32, 3), rel=0.02)
    assert table.seconds(32, 0, 0) == pytest.approx(CPU.steady(32, 0), rel=0.1)
    for k, steps in ((0, 2), (3, 60), (0, 2), (3, 60)):  # and with probes less
        for _ in range(steps):
            table.observe(32, k, 0, CPU.steady(32, k))
    assert table.seconds(32, 0, 0) == pytest.approx(CPU.steady(32, 0), rel=0.07)


@pytest.mark.parametrize("keeps", [0.7, 3.0, 15.0])
def test_at_a_changing_pace_the_k_in_turn_are_told_from_it(keeps: float) -> None:
    """A machine that is faster and slower by a third, as one that others use: what steps at each K
    took then is wrong by as much, and by how they compare it must be known better."""
    errors = []
    for seed in range(4):
        rng, table, changes, pace = random.Random(seed), CostTable(5), 0.0, 1.0
        table.load(calibration(CPU, 5).cells)
        now = 0.0
        for turn in range(24):
            k, end = (0, 3, 1, 5)[(turn + turn // 4) % 4], now + 5.0
            while now < end:
                if now > changes:
                    changes = now + rng.expovariate(1.0 / keeps)
                    pace = rng.choice((1.0, 1.4))
                seconds = pace * CPU.steady(32, k) * rng.lognormvariate(0.0, 0.08)
                table.observe(32, k, 0, seconds)
                now += seconds
            row = table.row(32, 0)
            if turn >= 8:
                errors += [
                    math.log(row[k] / row[0] / (CPU.steady(32, k) / CPU.steady(32, 0)))
                    for k in (1, 3, 5)
                ]
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.07


def test_context_counts_once_it_is_long_and_short_ones_are_not_extrapolated() -> None:
    rng, table = random.Random(0), CostTable(7)
    table.load(calibration(CPU, 7).cells)
    for step in range(300):  # contexts of some hundred tokens, and noise
        table.observe(4, 4, step, CPU.steady(4, 4) * rng.lognormvariate(0, 0.05))
    assert table.row(4, 30_000)[0] < 1.3 * CPU.steady(4, 0)
    for step in range(3000):
        context = 20_000 + 10 * step
        table.observe(4, 4, context, CPU.steady(4, 4) + 2e-7 * context)
    assert table.row(4, 50_000)[4] == pytest.approx(CPU.steady(4, 4) + 1e-2, rel=0.1)


def test_memory_is_constant() -> None:
    rng, table = random.Random(0), CostTable(3)
    for _ in range(3000):
        table.observe(rng.randint(1, 100_000), rng.randint(0, 3), 0, 0.01)
    assert len(table.cells()) <= 25 * 4


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(0, 7), st.floats(1e-4, 10.0)),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_whatever_is_measured_costs_stay_positive_and_finite(
    steps: list[tuple[int, int, float]],
) -> None:
    table = CostTable(7)
    for requests, k, seconds in steps:
        table.observe(requests, k, 0, seconds)
    for requests in (1, 30, 1000):
        row = table.row(requests, 1000)
        assert all(0.0 < seconds < math.inf for seconds in row)


def test_the_fit_is_never_negative_and_finds_costs_made_of_its_terms() -> None:
    true = [4e-3, 2e-4, 3e-5, 1e-4, 5e-5, 0.0, 2e-3, 2e-5]
    model = CostModel()
    model.coefficients = list(true)
    cells = [
        Cell(n, k, 0.0, model.seconds(n, k, 0.0), 10.0)
        for n in (1, 4, 16, 64, 128)
        for k in range(8)
    ]
    fitted = CostModel()
    for _ in range(100):
        fitted.fit(cells)
    assert all(value >= 0.0 for value in fitted.coefficients)
    for cell in cells:
        seconds = fitted.seconds(cell.requests, cell.k, cell.context)
        assert seconds == pytest.approx(cell.seconds, rel=0.02)


def test_buckets_are_exact_for_small_batches_and_half_octaves_above() -> None:
    assert len({bucket_of(n) for n in (1, 2, 3, 4, 6, 8, 12, 16)}) == 8
    numbers = [bucket_of(n) for n in range(1, 10_000)]
    assert numbers == sorted(numbers)
    assert bucket_of(10**9) == bucket_of(5000)
