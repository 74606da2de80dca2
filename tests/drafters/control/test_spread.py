"""Drafts for each request: as good as the best sharing out there is, and never more than asked."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.control.spread import Spread


def told(rates: dict[str, float], k_max: int = 11, steps: int = 200) -> Spread:
    """One that has seen requests with these rates of acceptance."""
    spread = Spread(k_max)
    for step in range(steps):
        for name, rate in rates.items():
            # 0 or all of 4 accepted, as often as makes the rate of reached drafts `rate`.
            right = (step * 0.618) % 1.0 < rate / (4.0 - 3.0 * rate)
            spread.observe(name, 4, 4 if right else 0)
    return spread


def tokens(rates: list[float], counts: tuple[int, ...]) -> float:
    return sum(sum(a**i for i in range(k + 1)) for a, k in zip(rates, counts, strict=True))


def test_it_is_nearly_the_best_way_to_share_out_as_many_drafts() -> None:
    rates = [0.9, 0.6, 0.3]
    spread = Spread(8)
    spread._own = {str(i): (1e6 * rate, 1e6) for i, rate in enumerate(rates)}
    spread._hits, spread._trials = 1.0, 2.0
    for k in (1, 2, 3):
        made = drafts = 0.0
        for _ in range(100):  # rounding evens out over steps
            shares = spread.share(k, ["0", "1", "2"])
            counts = (shares["0"], shares["1"], shares["2"])
            made, drafts = made + tokens(rates, counts) / 100, drafts + sum(counts) / 100
        best = max(tokens(rates, c) for c in product(range(9), repeat=3) if sum(c) == 3 * k)
        assert drafts == pytest.approx(3 * k, abs=0.05)
        alike = tokens(rates, (k, k, k))
        assert made == pytest.approx(best, rel=0.03) and made - alike > 0.7 * (best - alike)


def test_code_gets_the_drafts_of_prose() -> None:
    spread = told({"code": 0.9, "prose": 0.4})
    shares = [spread.share(3, ["code", "prose"]) for _ in range(20)]
    assert sum(s["code"] for s in shares) >= 3 * sum(s["prose"] for s in shares) > 0


def test_requests_that_are_alike_have_the_same() -> None:
    spread = told(dict.fromkeys("abcd", 0.7))
    for _ in range(10):
        assert spread.share(3, list("abcd")) == dict.fromkeys("abcd", 3)


def test_who_is_not_known_is_not_shared_with_and_who_is_over_is_forgotten() -> None:
    spread = told({"a": 0.9, "b": 0.5})
    assert set(spread.share(2, ["a", "b", "new"])) == {"a", "b"}
    spread.observe("new", 0, 0)  # had no drafts: that says nothing
    assert spread.share(2, ["new"]) == {}
    spread.keep({"b", "never seen"})
    assert spread.share(2, ["a"]) == {}


def test_a_request_that_was_given_up_is_tried_again() -> None:
    """Else nobody would see that its text has become easy."""
    spread = told({"hard": 0.02, "easy": 0.9})
    drafts = [spread.share(1, ["hard", "easy"])["hard"] for _ in range(40)]
    assert 0 < sum(drafts) < 20


def test_a_stretch_of_easy_text_is_seen_within_a_few_steps() -> None:
    spread = told({"a": 0.3, "b": 0.3})
    assert spread.share(3, ["a", "b"])["a"] == 3
    for _ in range(3):
        spread.observe("a", 3, 3)
    assert spread.share(3, ["a", "b"])["a"] >= 4


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=60),
    st.integers(0, 11), st.integers(1, 9), st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=80)
def test_shares_are_whole_and_bounded_and_as_many_as_asked(
    steps: list[tuple[int, int]], k: int, count: int, rng: random.Random
) -> None:
    spread = Spread(11)
    names = [str(i) for i in range(count)]
    for drafts, accepted in steps:
        spread.observe(rng.choice(names), drafts, min(drafts, accepted))
    for _ in range(5):
        shares = spread.share(k, names)
        assert all(0 <= share <= 11 for share in shares.values())
        assert abs(sum(shares.values()) - k * len(shares)) <= 1
