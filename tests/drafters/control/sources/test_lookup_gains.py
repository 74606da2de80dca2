"""What lookups are worth, as learnt from steps."""

from __future__ import annotations

import pytest

from drafters.control.cost_table import Cell
from drafters.control.policy import Load, Match, Step
from drafters.control.sources.draft_plan import match_class
from drafters.control.sources.lookup_gains import LookupGains
from drafters.control.tuning import Tuning

PLAIN_S, DRAFT_S, PASS_S = 0.02, 0.0005, 0.002  # of a step, each draft token, the head's pass
SURVIVAL = (0.6, 0.3, 0.1)


def gains() -> LookupGains:
    made = LookupGains(k_max=3, most=10, tuning=Tuning())
    made.load_calibration([Cell(n, 0, PLAIN_S, 5) for n in (1, 4, 16)])
    return made


def step(
    requests: int, drafts: int, *matches: Match, k: int = 0, tokens: int | None = None
) -> Step:
    seconds = PLAIN_S + DRAFT_S * drafts + PASS_S * (k > 0)
    made = requests if tokens is None else tokens
    return Step(
        Load(requests, draft_tokens=drafts), k, seconds, made, (), (),
        draft_seconds=PASS_S * (k > 0), matches=matches,
    )  # fmt: skip


def taught(
    requests: int, drafts: int, *matches: Match, k: int = 0, steps: int = 300
) -> LookupGains:
    made = gains()
    for _ in range(steps):
        made.observe(step(requests, drafts, *matches, k=k), 0.0, settled=True)
    return made


def test_matches_are_learnt_by_their_length_whether_drafted_from_or_not() -> None:
    found = taught(2, 0, Match(3, 1, 0), Match(16, 4, 4))
    rows = {row["match"]: row for row in found.rows()}
    assert rows[3]["conditional"] < 0.1 and rows[16]["conditional"] > 0.95
    assert rows[4]["conditional"] == Tuning().prior_match_acceptance[2]  # nothing was seen of it
    lookups = found.plan(Load(2), 0, SURVIVAL, 0.0, 100.0).lookups
    assert lookups[match_class(3)].gain < 0.05 < 7.0 < lookups[match_class(16)].gain


def test_a_lookup_costs_what_verifying_it_takes() -> None:
    """At one request and 50 tokens a second each token takes 0.025 tokens' time, so that the
    fourth draft token, which is right in 1 of 16 cases, still pays and the sixth does not."""
    made = gains()
    for number in range(2000):
        equal = next((i for i in range(10) if number >> i & 1), 10)
        made.observe(step(1, 10, Match(4, min(10, equal + 1), equal)), 0.0, settled=True)
    worth = made.plan(Load(1), 0, SURVIVAL, 0.0, 50.0).lookups[match_class(4)]
    assert worth.tokens in (4, 5)
    priced = sum(0.5**i for i in range(1, worth.tokens + 1)) - worth.tokens * DRAFT_S * 50
    assert worth.gain == pytest.approx(priced, abs=0.05)


@pytest.mark.parametrize("drafts", [1, 4, 8, 20])
def test_steps_in_which_few_requests_have_drafts_tell_what_a_draft_token_takes(drafts: int) -> None:
    """Catches: one draft token in a batch of 16 counts as one of each request, and a lookup looks
    sixteen times as cheap as it is."""
    made = taught(16, drafts)
    price = made.prices(Load(16), 100.0)[1] / made.tokens_per_second(Load(16), 100.0)
    assert price == pytest.approx(DRAFT_S, rel=0.15)


def test_the_heads_pass_is_priced_apart_from_what_it_verifies() -> None:
    found = taught(1, 2, k=2).plan(Load(1), 2, SURVIVAL, 1e-4, 50.0)
    rate = 1.0 / (PLAIN_S + 2 * DRAFT_S + PASS_S)  # of late
    assert found.pass_price == pytest.approx(rate * PASS_S, rel=0.1)
    assert found.read_price == pytest.approx(rate * 1e-4, rel=0.1)
    assert found.head_k == 3 - 1 and found.head_gain == pytest.approx(0.9 - 2 * DRAFT_S * rate, 0.1)


def test_a_batch_that_makes_more_tokens_pays_more_for_a_second() -> None:
    """The rate is that of the steps of late, where they were of about this batch."""
    made = gains()
    for _ in range(100):
        made.observe(step(4, 40, tokens=40), 0.0, settled=True)
    expected = 40 / (PLAIN_S + 40 * DRAFT_S)
    assert made.tokens_per_second(Load(4), 200.0) == pytest.approx(expected, rel=0.05)
    assert made.tokens_per_second(Load(1), 50.0) == 50.0


def test_plain_steps_are_known_from_the_pace_of_those_with_lookups() -> None:
    """The machine slows down by a half, while no step is without drafts."""
    made = taught(4, 40)
    for _ in range(300):
        slow = step(4, 40)
        made.observe(slow._replace(seconds=1.5 * slow.seconds), 0.0, settled=True)
    assert made.plain_seconds(4) == pytest.approx(1.5 * PLAIN_S, rel=0.3)


def test_a_plain_step_just_after_drafts_tells_nothing_of_plain_steps() -> None:
    made, slow = gains(), step(1, 0)._replace(seconds=2.0 * PLAIN_S)
    before = made.plain_seconds(1)
    for _ in range(50):
        made.observe(slow, 0.0, settled=False)
    assert made.plain_seconds(1) == before
    for _ in range(50):
        made.observe(slow, 0.0, settled=True)
    assert made.plain_seconds(1) == pytest.approx(2.0 * PLAIN_S, rel=0.1)


def test_the_heads_pass_is_no_part_of_verifying() -> None:
    verified = taught(1, 3, k=3).verification.row(1)[3].seconds
    assert verified == pytest.approx(PLAIN_S + 3 * DRAFT_S, rel=0.02)
