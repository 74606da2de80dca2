"""What lookups are worth, as learnt from how matches went on."""

from __future__ import annotations

import pytest

from drafters.control.policy import Load, Match, Step
from drafters.control.sources.draft_plan import Worth, match_class
from drafters.control.sources.lookup_gains import LookupGains
from drafters.control.tuning import Tuning

MOST = 10
PRICES = [0.025 * n for n in range(MOST + 1)]


def gains() -> LookupGains:
    return LookupGains(MOST, Tuning())


def step(*matches: Match) -> Step:
    return Step(Load(len(matches)), 0, 0.02, len(matches), (), (), matches=matches)


def test_matches_are_learnt_by_their_length_whether_drafted_from_or_not() -> None:
    found = gains()
    for _ in range(300):
        found.observe(step(Match(3, 1, 0), Match(16, 4, 4)))
    rows = {row["match"]: row for row in found.rows()}
    assert rows[3]["conditional"] < 0.1 and rows[16]["conditional"] > 0.95
    assert rows[4]["conditional"] == Tuning().prior_match_acceptance[2]  # nothing was seen of it
    lookups = found.worth_by_class(PRICES)
    assert lookups[match_class(3)].gain < 0.05 < 7.0 < lookups[match_class(16)].gain


def test_a_lookup_costs_what_verifying_it_takes() -> None:
    """Each token takes the time of 0.025 tokens, so that the fourth draft token, which is right in
    1 of 16 cases, still pays and the sixth does not."""
    found = gains()
    for number in range(2000):
        equal = next((i for i in range(MOST) if number >> i & 1), MOST)
        found.observe(step(Match(4, min(MOST, equal + 1), equal)))
    worth = found.worth_by_class(PRICES)[match_class(4)]
    assert worth.tokens in (4, 5)
    priced = sum(0.5**i for i in range(1, worth.tokens + 1)) - PRICES[worth.tokens]
    assert worth.gain == pytest.approx(priced, abs=0.05)


def test_a_lookup_that_hardly_pays_has_no_tokens() -> None:
    """One token, right in half of the cases, at .45 and at .35 of a token. Catches: drafts that pay
    by an error of the estimates alone, in each step in which they do."""
    found = gains()
    for number in range(2000):
        found.observe(step(Match(4, 1, number % 2)))
    rising = [0.0, *(9.0 + n for n in range(MOST))]
    for price, tokens in ((0.45, 0), (0.35, 1)):
        rising[1] = price
        assert found.worth_by_class(rising)[match_class(4)].tokens == tokens


def test_a_lookup_that_never_pays_has_no_tokens() -> None:
    """Catches: a loss that is drafted because every other number of tokens loses more."""
    assert set(gains().worth_by_class([float(n) for n in range(MOST + 1)])) == {Worth(0, 0.0)}
