"""Acceptance by position, and how old trials fade."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.control.acceptance import Acceptance
from drafters.control.policy import Load
from drafters.control.tuning import Tuning

TUNING = Tuning()


def learned(rates: tuple[float, ...], steps: int = 400, requests: int = 100) -> Acceptance:
    """After steps in which exactly these shares of drafts are accepted at each position."""
    found = Acceptance(len(rates), TUNING)
    accepted, reached = [], float(requests)
    for rate in rates:
        reached *= rate
        accepted.append(round(reached))
    for _ in range(steps):
        found.observe(requests, [requests] * len(rates), accepted)
    return found


def test_each_position_has_the_rate_of_its_own_drafts() -> None:
    """Catches: hits or trials counted one position off."""
    found = learned((0.9, 0.5, 0.2))
    assert found.conditional() == pytest.approx([0.9, 0.5, 0.2], abs=0.02)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_comparisons_tell_the_same_one_by_one_and_together(at_once: int) -> None:
    """Drafts that are verified are compared up to their first wrong token, others with all tokens
    of their step. Catches: a rate of .50 at the second position that counts as .66 with two
    drafts a step and as .89 with eight, as if it did not depend on the draft how far it is
    compared."""
    found, rng = Acceptance(3, TUNING), random.Random(0)
    for _ in range(8000 // at_once):
        comparisons = []
        for _ in range(at_once):
            right = next((i for i in range(3) if rng.random() < 0.5), 3)
            compared = rng.choice([min(3, right + 1)] * 8 + [1, 3])
            comparisons.append((compared, min(right, compared)))
        found.observe_comparisons(comparisons)
    assert found.conditional() == pytest.approx([0.5, 0.5, 0.5], abs=0.08)


def test_survival_is_of_the_position_itself_and_all_before() -> None:
    """Catches: survival shifted by one position."""
    found = learned((0.9, 0.5, 0.2))
    assert found.survival() == pytest.approx([0.9, 0.45, 0.09], abs=0.02)


def test_before_any_draft_the_prior_holds_at_every_position() -> None:
    found = Acceptance(3, TUNING)
    assert found.conditional() == pytest.approx([TUNING.prior_acceptance] * 3)


def test_positions_that_are_not_drafted_do_not_bias_the_others() -> None:
    """Half of the steps draft one token, half three: a share of all steps would halve."""
    found = Acceptance(3, TUNING)
    for _ in range(400):
        found.observe(10, [10], [8])
        found.observe(10, [10, 10, 10], [8, 4, 2])
    assert found.conditional() == pytest.approx([0.8, 0.5, 0.5], abs=0.03)


def test_a_position_nobody_drafts_becomes_like_the_one_before_it() -> None:
    found = learned((0.9, 0.9, 0.1))
    for _ in range(600):
        found.observe(10, [10, 10], [9, 8])
    assert found.conditional()[2] == pytest.approx(found.conditional()[1], abs=0.1)


def test_requests_near_their_limit_count_in_proportion() -> None:
    """Only half of those that accept the first draft have a second; it is right half the time."""
    found = Acceptance(2, TUNING)
    for _ in range(400):
        found.observe(40, [40, 20], [20, 5])
    assert found.conditional() == pytest.approx([0.5, 0.5], abs=0.03)


def test_after_long_without_drafts_few_new_ones_decide() -> None:
    found = learned((0.05, 0.05))
    for _ in range(2000):
        found.observe(6, (), ())
    assert found.conditional()[0] == pytest.approx(0.05, abs=0.01), "a mean does not fade"
    assert found.trials[0] == pytest.approx(TUNING.prior_trials)
    for _ in range(8):
        found.observe(6, [6, 6], [5, 4])
    assert found.conditional()[0] > 0.6


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((), [10.0, 19.0, 23.5, 24.4]),
        # [i]: requests that may have more than i draft tokens.
        ((10, 4, 0), [10.0, 19.0, 20.8, 20.8]),
        ((0, 0, 0), [10.0, 10.0, 10.0, 10.0]),
    ],
)
def test_tokens_are_the_targets_own_and_those_accepted(
    limits: tuple[int, ...], expected: list[float]
) -> None:
    """Catches: the target's token left out, a position counted once too often, limits ignored."""
    found = learned((0.9, 0.5, 0.2), steps=2000)
    load = Load(10, requests_by_draft_limit=limits)
    assert found.tokens(load) == pytest.approx(expected, rel=0.01)


def test_tokens_without_a_drafter_are_the_targets_own() -> None:
    assert Acceptance(0, TUNING).tokens(Load(7)) == [7.0]


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 5), st.data()), max_size=20))
def test_rates_are_shares_whatever_is_observed(steps: list[tuple[int, int, st.DataObject]]) -> None:
    found = Acceptance(5, TUNING)
    for requests, k, data in steps:
        drafted, accepted, most, hit = [], [], requests, requests
        for _ in range(k):
            most = data.draw(st.integers(0, most))
            hit = data.draw(st.integers(0, min(hit, most)))
            drafted.append(most)
            accepted.append(hit)
        found.observe(requests, drafted, accepted)
        assert all(0.0 <= rate <= 1.0 for rate in found.conditional())
        assert found.survival() == sorted(found.survival(), reverse=True)


def test_limited_trials_keep_the_rates_and_let_new_ones_decide_soon() -> None:
    """After a swap of the head. Catches: rates that a swap changes; the old head's trials in full,
    and more trials than there were."""
    acceptance = Acceptance(2, Tuning())
    for _ in range(100):
        acceptance.observe(100, (100, 100), (90, 45))
    before, trials = acceptance.conditional(), list(acceptance.trials)
    acceptance.limit_trials(10 * trials[0])
    assert acceptance.trials == trials
    acceptance.limit_trials(50.0)
    assert acceptance.trials == pytest.approx([50.0, 50.0 * trials[1] / trials[0]])
    assert acceptance.conditional()[0] == pytest.approx(before[0])
    acceptance.observe(100, (100, 100), (10, 1))
    assert acceptance.conditional()[0] < 0.5 * before[0]
