"""What share of the drafts a drafter offers, whatever K is when it is asked."""

from __future__ import annotations

import random

import pytest

from drafters.control.offers import Offers

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)


def run(k: int, shares: tuple[float, ...] = SHARES, steps: int = 400) -> list[float]:
    offers, rng = Offers(len(shares)), random.Random(0)
    for _ in range(steps):
        drafted, doubted = [0] * len(shares), [0] * len(shares)
        for _ in range(8):
            for i, share in enumerate(shares[:k]):
                if rng.random() >= share:
                    doubted[i] += 1
                    break
                drafted[i] += 1
        offers.observe(drafted, doubted)
    return offers.survival()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_shares_are_those_of_the_positions_that_were_asked_for(k: int) -> None:
    survival, expected = run(k), 1.0
    for share, found in zip(SHARES[:k], survival, strict=False):
        expected *= share
        assert found == pytest.approx(expected, abs=0.04)
    # Nothing is known of the others but what the last position shows.
    for before, found in zip(survival[k - 1 :], survival[k:], strict=False):
        assert found <= before


def test_nothing_is_left_out_until_something_was() -> None:
    offers = Offers(4)
    assert offers.survival() == [1.0] * 4
    offers.observe((5, 5, 5, 5), ())  # it had to offer all: says nothing
    offers.observe((0, 0, 0, 0), (0, 0, 0, 0))
    assert offers.survival() == [1.0] * 4
    offers.observe((8, 2, 2, 2), (0, 6, 0, 0))
    first, second, *_ = offers.survival()
    assert first == 1.0 and 0.6 < second < 0.9


def test_it_forgets() -> None:
    offers = Offers(2)
    for _ in range(300):
        offers.observe((8, 0), (0, 8))
    assert offers.survival()[1] < 0.1
    for _ in range(600):
        offers.observe((8, 8), (0, 0))
    assert offers.survival()[1] > 0.95
