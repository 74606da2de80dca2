"""Costs by batch and K: interpolation, order, and no changes by a disturbance."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.control.cost_table import Cell, CostTable, bucket_of, monotone
from drafters.control.tuning import Tuning
from tests.drafters.control.engines import CPU, TWO_CORES, calibration

K_MAX = 7


def table() -> CostTable:
    found = CostTable(range(K_MAX + 1), Tuning())
    found.load(calibration(CPU, K_MAX))
    return found


def seconds_of(found: CostTable, requests: int) -> list[float]:
    """Of a steady step at each K."""
    return [cost.seconds for cost in found.row(requests).values()]


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 64])
def test_a_calibration_of_a_few_batches_and_k_tells_of_all_between(requests: int) -> None:
    """Catches: the cost of another batch; an interpolation that is off."""
    seconds = seconds_of(table(), requests)
    for k in range(K_MAX + 1):
        assert seconds[k] == pytest.approx(CPU.steady(requests, k), rel=0.03)


@pytest.mark.parametrize("requests", [1, 4, 10, 16, 40])
def test_a_cost_that_is_no_sum_of_the_terms_is_followed_too(requests: int) -> None:
    found = CostTable(range(K_MAX + 1), Tuning())
    found.load(calibration(TWO_CORES, K_MAX, steps=1))
    seconds = seconds_of(found, requests)
    for k in range(K_MAX + 1):
        assert seconds[k] == pytest.approx(TWO_CORES.steady(requests, k), rel=0.17)


def test_steps_teach_their_own_batch_and_leave_others_alone() -> None:
    """Catches: a step that teaches the entry of another batch."""
    found = table()
    before = seconds_of(found, 1), seconds_of(found, 64)
    rng = random.Random(1)
    for _ in range(300):  # 40% dearer at 8 requests and K = 3, nowhere else
        for k, factor in ((0, 1.0), (3, 1.4)):
            seconds = factor * CPU.steady(8, k) * rng.lognormvariate(0.0, 0.03)
            found.observe(8, k, seconds)
    assert seconds_of(found, 8)[3] == pytest.approx(1.4 * CPU.steady(8, 3), rel=0.05)
    assert seconds_of(found, 8)[0] == pytest.approx(CPU.steady(8, 0), rel=0.05)
    assert seconds_of(found, 1)[0] == pytest.approx(before[0][0], rel=0.05)
    assert seconds_of(found, 64)[3] == pytest.approx(before[1][3], rel=0.05)


def test_what_slows_all_k_alike_is_no_cost_of_the_one_in_force() -> None:
    """Catches: a pace that is not shared. After a disturbance the other K would look dear for good,
    and nobody would try them."""
    found = table()
    for factor in (1.0, 3.0, 1.0):
        for _ in range(400):
            found.observe(4, 3, factor * CPU.steady(4, 3))
        seconds = seconds_of(found, 4)
        assert seconds[3] == pytest.approx(factor * CPU.steady(4, 3), rel=0.03)
        assert seconds[0] / seconds[3] == pytest.approx(
            CPU.steady(4, 0) / CPU.steady(4, 3), rel=0.2
        )


def test_a_pause_hardly_tells_anything() -> None:
    """Catches: a pause that counts by its length. A step of 20 times the length is a hiccup."""
    found = table()
    for _ in range(50):
        found.observe(4, 3, CPU.steady(4, 3))
    before = seconds_of(found, 4)
    found.observe(4, 3, 20.0 * CPU.steady(4, 3))
    assert seconds_of(found, 4) == pytest.approx(before, rel=0.04)


def test_a_step_that_lasts_longer_from_now_on_is_believed_soon() -> None:
    """Catches: outliers that never count. Another process takes half of the machine."""
    found = table()
    for _ in range(50):
        found.observe(4, 3, CPU.steady(4, 3))
    for _ in range(90):
        found.observe(4, 3, 2.0 * CPU.steady(4, 3))
    assert seconds_of(found, 4)[3] == pytest.approx(2.0 * CPU.steady(4, 3), rel=0.1)


def test_steps_beside_a_busy_process_are_not_believed() -> None:
    """A few wild steps of another K, among wild ones of the K in force: its cost hardly moves, and
    it is known as little as before."""
    found, rng = table(), random.Random(0)
    for _ in range(200):
        found.observe(1, 0, CPU.steady(1, 0) * rng.choice((1.0, 2.0, 4.0)))
    for _ in range(2):
        found.observe(1, 5, CPU.steady(1, 5) * 8.0)
    for _ in range(400):
        found.observe(1, 0, CPU.steady(1, 0))
    costs = found.row(1)
    honest = CPU.steady(1, 5) / CPU.steady(1, 0)
    assert costs[5].seconds / costs[0].seconds < 2.5 * honest
    assert costs[5].variance > 0.1, "it is to be tried again soon"


def test_what_was_measured_long_ago_is_doubted() -> None:
    """Catches: a variance that does not grow with time, or that falls without a step."""
    found = table()
    for _ in range(100):
        found.observe(2, 3, CPU.steady(2, 3))
    fresh = found.row(2)[3].variance
    for _ in range(2000):
        found.observe(2, 0, CPU.steady(2, 0))
    assert found.row(2)[3].variance == pytest.approx(
        fresh + Tuning().cost_noise * 2000 * CPU.steady(2, 0)
    )


def test_an_estimate_far_from_any_measured_batch_is_doubted() -> None:
    found = CostTable(range(2), Tuning())
    found.load([Cell(4, k, CPU.steady(4, k), 4) for k in range(2)])
    variances = [found.row(requests)[1].variance for requests in (4, 8, 16)]
    assert variances[1] - variances[0] == pytest.approx(Tuning().octave_variance)
    assert variances[2] - variances[0] == pytest.approx(4 * Tuning().octave_variance)


def test_one_cost_that_is_out_of_order_gives_way_to_those_that_are_known() -> None:
    """Four steps of K = 1 beside a busy process, 3.5 times as long; the others are well known."""
    found = CostTable(range(4), Tuning())
    found.load([Cell(1, 1, 3.5 * CPU.steady(1, 1), 4)])
    for _ in range(50):
        for k in (0, 2, 3):
            found.observe(1, k, CPU.steady(1, k))
    assert seconds_of(found, 1)[1] == pytest.approx(CPU.steady(1, 2), rel=0.1)


def test_steps_are_counted_by_batch() -> None:
    found = table()
    for _ in range(7):
        found.observe(8, 2, CPU.steady(8, 2))
    assert (found.steps(8, 2), found.steps(1, 1)) == (7, 5), "the calibration's are five"
    assert found.steps(30, 2) == 0, "its cost is estimated from other batches"
    assert CostTable(range(4), Tuning()).steps(1, 1) == 0


def test_a_cell_of_the_calibration_is_never_changed() -> None:
    cell = Cell(1, 0, 0.1, 4)
    tables = [CostTable(range(2), Tuning()) for _ in range(2)]
    for found in tables:
        found.load([cell])
    for _ in range(50):
        tables[0].observe(1, 0, 0.2)
    assert seconds_of(tables[1], 1)[0] == pytest.approx(cell.seconds, rel=0.01)


@given(
    st.lists(
        st.tuples(st.integers(1, 128), st.integers(0, K_MAX), st.floats(1e-4, 10.0)), min_size=1,
        max_size=40,
    ),
    st.integers(1, 256),
)  # fmt: skip
def test_costs_never_fall_with_k_whatever_was_measured(
    steps: list[tuple[int, int, float]], requests: int
) -> None:
    found = CostTable(range(K_MAX + 1), Tuning())
    for n, k, seconds in steps:
        found.observe(n, k, seconds)
    costs = list(found.row(requests).values())
    assert all(a.seconds <= b.seconds * (1 + 1e-9) for a, b in itertools.pairwise(costs))
    assert all(cost.seconds > 0.0 and cost.variance > 0.0 for cost in costs)


# Libraries of a model round subnormal numbers to 0, for the whole process.
NUMBERS = st.floats(-5.0, 5.0, allow_subnormal=False)


@given(st.lists(st.tuples(NUMBERS, st.floats(0.1, 10.0)), min_size=1))
def test_monotone_is_the_nearest_rising_sequence(pairs: list[tuple[float, float]]) -> None:
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    found = monotone(values, weights)
    assert len(found) == len(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found))
    mean = sum(v * w for v, w in pairs) / sum(weights)
    assert sum(v * w for v, w in zip(found, weights, strict=True)) / sum(weights) == pytest.approx(
        mean, abs=1e-6
    )
    if values == sorted(values):
        assert found == values


def test_buckets_are_half_octaves() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 6, 8, 16)] == [0, 2, 3, 4, 5, 5, 6, 8]


def test_a_batch_is_its_own_witness() -> None:
    """10 to 13 requests share an entry, which was made at 10. Catches: a load of 13 that for ever
    believes half of what the calibration said of 16, beside a busy process."""
    found = CostTable([0], Tuning())
    found.load([Cell(4, 0, 0.010, 5), Cell(16, 0, 0.100, 5)])
    for _ in range(100):
        found.observe(10, 0, 0.020)
    for _ in range(300):
        found.observe(13, 0, 0.022)
    assert found.row(13)[0].seconds == pytest.approx(0.022, rel=0.03)
    assert found.row(13)[0].variance < Tuning().step_noise / 2
