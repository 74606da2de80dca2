"""Bootstrap over rounds: ratios are paired; the best of several, with luck in it and without."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.load import intervals
from bench.load.intervals import (
    interval,
    of_equal_time,
    of_equal_work,
    over_best,
    over_best_of_other_rounds,
    ratio,
    speed,
)


def test_a_paired_ratio_does_not_see_what_all_share() -> None:
    """Rounds differ by a factor of two, the ratio by nothing."""
    other = {i: 100.0 * (1 + i % 2) for i in range(8)}
    one = {i: 1.2 * value for i, value in other.items()}
    value, spread = ratio(one, other)
    assert value == pytest.approx(1.2)
    assert spread == pytest.approx((1.2, 1.2))
    low, high = interval(sorted(other), lambda chosen: speed(other, chosen)) or (0, 0)
    assert high - low > 20  # while speeds themselves do


@pytest.mark.parametrize(
    ("count", "rivals"), [(3, 1), (4, 1), (6, 1), (12, 1), (3, 4), (6, 4), (12, 4)]
)
def test_the_interval_holds_the_truth_as_often_as_it_says(
    count: int, rivals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios over one system, and over the best of several of which one is best in truth."""
    monkeypatch.setattr(intervals, "RESAMPLES", 200)
    rng, hits, trials = random.Random(2), 0, 600
    for _ in range(trials):
        one, *others = (
            {i: speed * rng.lognormvariate(0, 0.05) for i in range(count)}
            for speed in (110.0, 100.0, 85.0, 80.0, 75.0)[: 1 + rivals]
        )
        value, spread = over_best(one, others)
        assert spread is not None
        assert spread[0] < value < spread[1]
        hits += spread[0] <= 1.1 <= spread[1]
    # Over many seeds 0.95; a standard error of 600 trials is 0.009.
    assert 0.93 * trials <= hits < 0.975 * trials


def test_equals_are_rarely_told_apart_from_the_best_of_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the best is chosen by the rounds that it is compared in costs some of the coverage."""
    monkeypatch.setattr(intervals, "RESAMPLES", 200)
    rng, hits, trials = random.Random(2), 0, 400
    for _ in range(trials):
        one, *others = (
            {i: 100.0 * rng.lognormvariate(0, 0.05) for i in range(6)} for _ in range(5)
        )
        _, spread = over_best(one, others)
        assert spread is not None
        hits += spread[0] <= 1.0 <= spread[1]
    assert hits >= 0.89 * trials  # percentiles of the resamples: 0.69


def test_a_statistic_that_may_be_zero_has_no_interval() -> None:
    gauges = {0: 0.0, 1: 1.0, 2: 1.2}
    assert interval([0, 1, 2], lambda chosen: statistics.fmean(gauges[i] for i in chosen)) is None


def test_speed_over_rounds_is_of_equal_work_not_of_equal_time() -> None:
    assert speed({0: 100.0, 1: 300.0}, [0, 1]) == pytest.approx(150.0)


@pytest.mark.parametrize("uneven", [0.0, 0.4])
def test_speed_over_turns_is_that_of_one_long_turn(uneven: float) -> None:
    """A user asks on through turns of a second and a half, of which half a second before is left
    out; texts differ in what drafts gain."""
    rng = random.Random(1)
    turns, tokens, seconds, left, pace = [], 0.0, 0.0, 0.0, 1.0
    for number in range(12000):
        took, counted = (0.5, 1.5)[number % 2], 0.0
        seconds += took
        while took > 0.0:
            if left <= 0.0:
                left, pace = rng.uniform(64, 192), 250.0 * rng.lognormvariate(0.0, uneven)
            now = min(took, left / pace)
            counted += now * pace
            took -= now
            left = left - now * pace if now < left / pace else 0.0
        tokens += counted
        if number % 2:
            turns.append(counted / 1.5)
    assert of_equal_time(turns) == pytest.approx(tokens / seconds, rel=0.01)
    off = of_equal_work(turns) / (tokens / seconds)
    assert off == pytest.approx(1.0, rel=0.001) if not uneven else off < 0.96


def test_only_rounds_that_all_have_count() -> None:
    value, spread = over_best({0: 90.0, 1: 50.0, 2: 1.0}, [{0: 100.0, 1: 50.0}, {0: 60.0, 1: 50.0}])
    assert value == pytest.approx((2 / (1 / 90 + 1 / 50)) / (2 / (1 / 100 + 1 / 50)))
    assert spread is None  # two rounds are too few for an interval
    with pytest.raises(ValueError, match="no round"):
        ratio({0: 1.0}, {1: 1.0})


def test_the_best_is_chosen_anew_in_every_resample() -> None:
    """Two equals that take turns: whoever was lucky is the one to beat, so that the luck of one of
    them matters less than against this one alone."""
    a = {i: 120.0 if i % 2 else 80.0 for i in range(10)}
    b = {i: 80.0 if i % 2 else 120.0 for i in range(10)}
    even = dict.fromkeys(range(10), 96.0)
    value, spread = over_best(even, [a, b])
    assert value == pytest.approx(1.0)
    _, alone = ratio(even, a)
    assert spread is not None and alone is not None
    assert spread[1] - spread[0] < 0.7 * (alone[1] - alone[0])


def test_luck_in_a_round_does_not_choose_who_is_the_best_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of equals with noise, one is ahead of another by chance alone: the best of four is 2% fast
    in eight rounds, the best of the other rounds is not."""
    monkeypatch.setattr(intervals, "RESAMPLES", 2)  # no interval is looked at
    rng = random.Random(7)
    biased, unbiased = [], []
    for _ in range(200):
        runs = [{i: rng.gauss(100.0, 5.0) for i in range(8)} for _ in range(5)]
        biased.append(over_best(runs[0], runs[1:])[0])
        share = over_best_of_other_rounds(runs[0], runs[1:])
        assert share is not None
        unbiased.append(share)
    assert statistics.fmean(biased) < 0.985
    assert statistics.fmean(unbiased) == pytest.approx(1.0, abs=0.005)


def test_the_best_of_other_rounds_is_the_best_where_one_is_faster_throughout() -> None:
    one, slow, fast = ({i: speed + i for i in range(3)} for speed in (90.0, 80.0, 100.0))
    share = over_best_of_other_rounds(one, [slow, fast])
    assert share == pytest.approx(over_best(one, [slow, fast])[0])
    assert over_best_of_other_rounds({0: 1.0, 1: 1.0}, [{0: 1.0, 1: 1.0}]) is None
