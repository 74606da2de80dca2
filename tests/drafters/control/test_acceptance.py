"""Acceptance by position: the right denominator, priors, and forgetting."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.control.acceptance import MEMORY, PRIOR, Acceptance
from drafters.control.growing import _nearer, _steps
from drafters.control.policy import Run

TRUE = (0.8, 0.6, 0.7, 0.5, 0.6)  # conditional
SURVIVAL = list(accumulate(TRUE, lambda left, right: left * right))


def verify(rng: random.Random, ks: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One step: request j had ks[j] drafts."""
    drafted, accepted = [0] * len(TRUE), [0] * len(TRUE)
    for k in ks:
        hits = bisect_left(SURVIVAL, -rng.random(), hi=k, key=float.__neg__) if k else 0
        for i in range(k):
            drafted[i] += 1
            accepted[i] += i < hits
    return tuple(drafted), tuple(accepted)


def test_a_k_that_varies_does_not_bias_it_as_it_biases_a_share_of_drafts() -> None:
    rng, model = random.Random(1), Acceptance(len(TRUE))
    drafts = hits = 0
    found = [0.0] * len(TRUE)
    rounds = 400
    for step in range(4000):
        drafted, accepted = verify(rng, [rng.choice((1, 1, 1, 5))] * 8)
        model.observe(drafted, accepted, ())
        drafts, hits = drafts + drafted[0], hits + accepted[2]
        if step % 10 == 0:  # a mean over the run: one reading has the error of its memory
            found = [x + y / rounds for x, y in zip(found, model.conditional(), strict=True)]
    # What dividing by drafts makes of position 3: a quarter of the truth.
    assert hits / drafts == pytest.approx(SURVIVAL[2] / 4, rel=0.1)
    assert found == pytest.approx(TRUE, abs=0.03)


def test_requests_with_fewer_drafts_in_the_same_step_do_not_bias_it() -> None:
    """Some requests end soon and are drafted less; counting them as rejections would show."""
    rng, model = random.Random(2), Acceptance(len(TRUE))
    for _ in range(3000):
        model.observe(*verify(rng, [5, 5, 2, 1, 0, 5, 3, 5]), ())
    assert model.conditional() == pytest.approx(TRUE, abs=0.06)


def steps_through(runs: list[int], k: int) -> list[int]:
    """Accepted drafts of each step through text of which the drafter gets `runs` right."""
    steps = []
    for run in runs:
        left = run
        while left >= k:
            steps.append(k)
            left -= k + 1  # the target's own token behind them is of the run
            if left < 0:
                break
        else:
            steps.append(left)
    return steps


def shown(steps: list[int], k: int, k_max: int = 11) -> tuple[list[float], list[float]]:
    """What so many accepted drafts of K teach: tokens at each K, and sums over positions. Means
    over time: one reading has the error of its memory."""
    model, run, tokens, sums = Acceptance(k_max), 0, [0.0] * (k_max + 1), [0.0] * (k_max + 1)
    readings = range(1000, len(steps) + 1, 500)
    for number, accepted in enumerate(steps, 1):
        model.observe((1,) * k, (1,) * accepted + (0,) * (k - accepted), [Run(run, accepted + 1)])
        run = run + accepted + 1 if accepted == k else 0
        if number in readings:
            positions = accumulate(model.survival(), initial=1.0)
            for found, values in ((tokens, model.tokens()), (sums, positions)):
                found[:] = [x + y / len(readings) for x, y in zip(found, values, strict=True)]
    return tokens, sums


@pytest.mark.parametrize("k", [1, 2, 5, 11])
def test_at_the_k_in_force_it_is_what_the_steps_made(k: int) -> None:
    """Whatever the text is like: these easy and hard steps follow no rule of runs."""
    rng = random.Random(4)
    steps = [rng.choice((0, 0, k, k, k // 2)) for _ in range(20_000)]
    assert shown(steps, k)[0][k] == pytest.approx(1.0 + sum(steps) / len(steps), rel=0.02)


def test_what_one_k_shows_holds_for_another_though_easy_text_comes_in_runs() -> None:
    rng = random.Random(3)
    # Hard places, where nothing is accepted for long, and easy stretches.
    runs = [rng.choice((0, 0, 0, 0, 1, 1, 2, 5, 9, 12, 20)) for _ in range(8000)]
    ks = (1, 2, 3, 5, 7, 11)
    through = {k: steps_through(runs, k) for k in ks}
    truth = {k: 1.0 + sum(steps) / len(steps) for k, steps in through.items()}
    off: dict[str, list[float]] = {"runs": [], "positions": []}
    for drafting in ks:
        for name, found in zip(off, shown(through[drafting], drafting), strict=True):
            off[name] += [abs(found[k] / truth[k] - 1.0) for k in ks]
    assert max(off["runs"]) < 0.15 and sum(off["runs"]) < 0.5 * sum(off["positions"])
    assert max(off["positions"]) > 0.25


def test_without_memory_the_sum_over_positions_is_what_a_step_makes() -> None:
    """But far beyond the K in force, where it is held for a little less."""
    rng = random.Random(5)
    expected = list(accumulate((0.8**i for i in range(1, 6)), initial=1.0))
    for drafting in (1, 2, 3, 5):
        steps = [
            next((i for i in range(drafting) if rng.random() > 0.8), drafting)
            for _ in range(20_000)
        ]
        tokens = shown(steps, drafting, 5)[0]
        assert tokens[: drafting + 2] == pytest.approx(expected[: drafting + 2], rel=0.02)
        assert tokens == pytest.approx(expected, rel=0.1)


def growing(runs: list[int], k: int, k_max: int) -> list[tuple[int, int, int]]:
    """(tokens of the run so far, drafts, of those accepted) of each step, where drafts grow."""
    steps, so_far = [], 0
    for run in runs:
        left = run
        while left >= 0:
            asked = min(k_max, k + so_far)
            accepted = min(left, asked)
            steps.append((so_far, asked, accepted))
            so_far = so_far + accepted + 1 if accepted == asked else 0
            left -= accepted + 1
    return steps


def test_where_drafts_grow_every_k_is_counted_with_what_it_would_have_asked_for() -> None:
    rng, k_max = random.Random(6), 11
    runs = [rng.choice((0, 0, 0, 0, 1, 1, 2, 5, 9, 12, 20, 40)) for _ in range(6000)]
    ks = (1, 2, 3, 5, 7, 11)
    through = {k: growing(runs, k, k_max) for k in ks}
    made = {k: 1 + sum(a for _, _, a in steps) / len(steps) for k, steps in through.items()}
    more = {k: sum(d - k for _, d, _ in steps) / len(steps) for k, steps in through.items()}
    alike = steps_through(runs, 2)
    assert more[2] > 0.5 and made[2] > 1.1 * (1 + sum(alike) / len(alike))
    for k in ks:
        model = Acceptance(k_max, grows=True)
        readings = range(1000, len(through[k]) + 1, 500)
        tokens, grown = [0.0] * (k_max + 1), [0.0] * (k_max + 1)
        for number, (run, drafts, accepted) in enumerate(through[k], 1):
            hits = (1,) * accepted + (0,) * (drafts - accepted)
            model.observe((1,) * drafts, hits, [Run(run, accepted + 1)], k)
            if number in readings:
                for found, values in ((tokens, model.tokens()), (grown, model.grown())):
                    found[:] = [x + y / len(readings) for x, y in zip(found, values, strict=True)]
        assert tokens[k] == pytest.approx(made[k], rel=0.02)
        assert grown[k] == pytest.approx(more[k], rel=0.05)
        for other in ks:
            assert tokens[other] == pytest.approx(made[other], rel=0.1), (k, other)


@given(st.integers(0, 300), st.integers(1, 12), st.integers(1, 11), st.booleans())
def test_a_long_run_is_counted_as_if_from_its_beginning(
    run: int, made: int, k: int, goes_on: bool
) -> None:
    """Where a run is long every step asks for the most, so that its beginning is left out."""
    k_max, before, begin, steps, more = 11, (k + 1) * goes_on, 0, 0, 0
    while begin < run + made:
        if begin >= run:
            steps, more = steps + 1, more + min(k_max - k, before + begin)
        begin += min(k_max, k + before + begin) + 1
    size = k_max + 1
    alone, after = np.array(_steps(run, made, size)).reshape(2, 2, size)
    taken, grown = alone + goes_on * after
    assert (taken[k], grown[k]) == (steps, more)
    assert (taken[0], grown[0]) == (made, 0)


def leaving_out(text: list[list[int]], k: int, k_max: int) -> list[tuple[Run, int, int]]:
    """(run, drafts, of those accepted) of each step through runs of tokens, each of which the
    drafter is sure of up to so many tokens away."""
    steps, run = [], Run()
    for far in text:
        at = 0
        while at <= len(far):
            asked = min(k_max, k + run.before)
            seen = [sure >= i for i, sure in enumerate(far[at : at + asked], 1)]
            accepted = seen.index(False) if False in seen else len(seen)
            wrong = accepted == len(far) - at < asked  # the run ends with a draft of that
            drafts = accepted + wrong
            run = run._replace(made=accepted + 1)
            steps.append((run, drafts, accepted))
            run = Run() if wrong else run.next(left_out=drafts < asked)
            at += accepted + 1
    return steps


@pytest.mark.parametrize("sure", [(1, 2, 3, 4), (1, 2, 3, 4, 6, 9, 12), (3, 8, 12, 12, 12)])
def test_drafts_left_out_deep_in_a_pass_are_nearer_at_a_smaller_k(sure: tuple[int, ...]) -> None:
    rng, k_max, ks = random.Random(7), 11, (1, 2, 3, 5, 7, 11)
    lengths = [rng.choice((0, 0, 1, 2, 5, 9, 12, 20, 40)) for _ in range(4000)]
    text = [[rng.choice(sure) for _ in range(length)] for length in lengths]
    through = {k: leaving_out(text, k, k_max) for k in ks}
    made = {k: 1 + sum(a for _, _, a in steps) / len(steps) for k, steps in through.items()}
    for k in ks:
        told, untold = Acceptance(k_max, grows=True), Acceptance(k_max, grows=True)
        for run, drafts, accepted in through[k]:
            hits = (1,) * accepted + (0,) * (drafts - accepted)
            told.observe((1,) * drafts, hits, [run], k)
            untold.observe((1,) * drafts, hits, [Run(run.before, run.made)], k)
        assert told.tokens()[k] == pytest.approx(made[k], rel=0.05)
        for other in (other for other in ks if other < k):
            assert told.tokens()[other] == pytest.approx(made[other], rel=0.12), (k, other)
        if k == k_max:
            assert untold.tokens()[1] < 0.84 * made[1]


RUN = st.builds(Run, st.integers(0, 60), st.integers(1, 12), st.integers(0, 60), st.integers(1, 12))


@given(st.lists(st.tuples(st.integers(1, 11), st.lists(RUN, min_size=1, max_size=8)), max_size=40))
@settings(max_examples=60)
def test_whatever_runs_say_steps_make_a_token_or_more_and_no_more_than_they_can(
    steps: list[tuple[int, list[Run]]],
) -> None:
    model = Acceptance(11, grows=True)
    for k, runs in steps:
        model.observe((len(runs),), (0,), runs, k)
    tokens = model.tokens()
    assert tokens[0] == 1.0 and all(b >= a for a, b in pairwise(tokens)) and tokens[-1] <= 12
    assert all(more >= 0.0 for more in model.grown())


@given(st.integers(1, 300), st.integers(2, 12), st.integers(1, 11))
def test_how_much_nearer_to_where_its_pass_begins_a_draft_is(
    place: int, position: int, k: int
) -> None:
    begins = [0]
    while begins[-1] < place:
        begins.append(begins[-1] + min(11, k + begins[-1]) + 1)
    at = place - begins[-2]
    expected = max(0.0, (position - at) / (position - 1))
    if place == begins[-1]:
        expected = 1.0
    assert _nearer(place, position, 12)[k] == pytest.approx(expected)


def test_nothing_known_is_the_prior_at_every_position() -> None:
    model = Acceptance(3)
    assert model.conditional() == [PRIOR] * 3
    assert model.tokens() == pytest.approx([1.0, 1.7, 2.19, 2.533])
    model.observe((), (), ())
    model.observe((0, 0, 0), (0, 0, 0), ())
    assert model.conditional() == [PRIOR] * 3


def test_positions_behind_the_drafted_ones_follow_the_last_one_known() -> None:
    model = Acceptance(4)
    for _ in range(500):
        model.observe((10, 8), (8, 3), ())  # .8, then 3 of 8 * .8
    first, second, third, fourth = model.conditional()
    assert first == pytest.approx(0.8, abs=0.01)
    assert second == pytest.approx(3 / 6.4, abs=0.02)
    assert third == fourth == second


def test_a_deep_position_that_is_no_longer_drafted_is_forgotten() -> None:
    """Else a workload that drafted well once would make K deep for ever."""
    model = Acceptance(2)
    for _ in range(300):
        model.observe((10, 10), (9, 9), ())
    assert model.conditional()[1] > 0.95
    for _ in range(1000):
        model.observe((10,), (3,), ())
    assert model.conditional() == pytest.approx([0.3, 0.3], abs=0.02)


def test_a_change_of_workload_is_seen_within_the_memory() -> None:
    model = Acceptance(1)
    for _ in range(1000):
        model.observe((10,), (9,), ())
    for _ in range(int(2 * MEMORY / 10)):
        model.observe((10,), (4,), ())
    assert model.conditional()[0] == pytest.approx(0.4 + 0.5 * 0.135, abs=0.02)  # e ** -2


@given(
    st.lists(
        st.lists(st.integers(0, 2000), min_size=1, max_size=6).map(
            lambda counts: sorted(counts, reverse=True)
        ),
        max_size=20,
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_rates_are_shares_and_tokens_grow_with_k(
    steps: list[list[int]], rng: random.Random
) -> None:
    model = Acceptance(5)
    for drafted in steps:
        left, accepted = drafted[0], []
        for count in drafted:
            left = rng.randint(0, min(left, count))
            accepted.append(left)
        runs = [Run(rng.randint(0, 40), rng.randint(1, 6)) for _ in range(min(drafted[0], 100))]
        model.observe(drafted, accepted, runs)
    tokens = model.tokens()
    assert all(0.0 <= rate <= 1.0 for rate in model.conditional())
    assert tokens[0] == 1.0
    assert all(b - a >= 0.0 for a, b in pairwise(tokens))  # by more than 1 where a run ends
    assert all(made <= k + 1 for k, made in enumerate(tokens))
    assert all(0.0 <= trials <= MEMORY + 2000 for trials in model.trials)
