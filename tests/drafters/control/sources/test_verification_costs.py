"""What verifying and a pass of the head take, as learnt from steps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from drafters.control.cost_table import Cell
from drafters.control.policy import Load, Step
from drafters.control.read_costs import ReadCosts
from drafters.control.sources.verification_costs import VerificationCosts
from drafters.control.tuning import Tuning

PLAIN_S, DRAFT_S, PASS_S = 0.02, 0.0005, 0.002  # of a step, each draft token, the head's pass


def costs() -> VerificationCosts:
    tuning = Tuning()
    made = VerificationCosts(3, 10, ReadCosts(tuning), tuning=tuning)
    made.load_calibration([Cell(n, 0, PLAIN_S, 5) for n in (1, 4, 16)])
    return made


def step(requests: int, drafts: int, *, k: int = 0, tokens: int | None = None) -> Step:
    seconds = PLAIN_S + DRAFT_S * drafts + PASS_S * (k > 0)
    made = requests if tokens is None else tokens
    return Step(
        Load(requests, draft_tokens=drafts), k, seconds, made, (), (),
        draft_seconds=PASS_S * (k > 0),
    )  # fmt: skip


def taught(requests: int, drafts: int, *, k: int = 0, steps: int = 300) -> VerificationCosts:
    made = costs()
    for _ in range(steps):
        made.observe(step(requests, drafts, k=k), 0.0, settled=True)
    return made


@pytest.mark.parametrize("drafts", [1, 4, 8, 20])
def test_steps_in_which_few_requests_have_drafts_tell_what_a_draft_token_takes(drafts: int) -> None:
    """Catches: one draft token in a batch of 16 counts as one of each request, and a lookup looks
    sixteen times as cheap as it is."""
    assert taught(16, drafts).prices(16, 1.0)[1] == pytest.approx(DRAFT_S, rel=0.15)


@pytest.mark.parametrize("start_s", [0.0, 0.004])
def test_prices_lie_on_a_line_through_what_was_measured(start_s: float) -> None:
    """Steps of one request verify 2, 5 or 8 draft tokens, whose seconds err by a fifth. Catches:
    the number of tokens chosen whose price happens to be too low, and, beyond the largest, what
    every draft costs counted for each token again."""
    made, rng = costs(), random.Random(0)
    for number in range(300):
        drafts = (2, 5, 8)[number % 3]
        beside = start_s + (DRAFT_S * drafts) * (1.0 + 0.2 * rng.gauss(0.0, 1.0))
        seen = step(1, drafts)._replace(seconds=PLAIN_S + beside)
        made.observe(seen, 0.0, settled=True)
    prices = made.prices(1, 1.0)
    expected = [start_s + DRAFT_S * n for n in range(1, 11)]
    assert prices[0] == 0.0 and prices[1:] == pytest.approx(expected, rel=0.15, abs=2e-4)
    steps = [after - before for before, after in pairwise(prices[1:])]
    assert steps == pytest.approx([steps[0]] * 9)


def test_tokens_that_a_grammar_cut_are_not_verified() -> None:
    """The head made three tokens for each request, of which the grammar left one. Catches: the
    seconds of one as the price of three."""
    made = costs()
    cut = step(4, 4)
    cut = cut._replace(load=cut.load._replace(draft_tokens=12, cut_tokens=8))
    for _ in range(300):
        made.observe(cut, 0.0, settled=True)
    assert made.prices(4, 1.0)[3] == pytest.approx(3 * DRAFT_S, rel=0.15)


def test_the_heads_pass_is_over_the_requests_that_may_have_drafts() -> None:
    """Catches: a pass over two of eight requests as the price of eight."""
    made = costs()
    few = step(8, 4, k=2)
    few = few._replace(load=few.load._replace(requests_by_draft_limit=(2, 2, 2)))
    for _ in range(300):
        made.observe(few, 0.0, settled=True)
    assert made.pass_seconds(2, 2)[0] == pytest.approx(PASS_S, rel=0.2)
    first_s, further_s = made.pass_seconds(8, 2)
    assert first_s + 7 * further_s > 1.1 * PASS_S


def test_verifying_is_free_until_a_step_was_measured() -> None:
    """The fault: without a calibration, a first step in which the head had taken all of the seconds
    taught nothing, and the next one ended the engine."""
    made = VerificationCosts(3, 10, ReadCosts(Tuning()), tuning=Tuning())
    made.observe(step(1, 3, k=3)._replace(draft_seconds=1.0), 0.0, settled=True)
    assert made.prices(1, 100.0) == [0.0] * 11
    made.observe(step(1, 3, k=3), 0.0, settled=True)
    assert made.prices(1, 100.0)[3] >= 0.0


def test_seconds_are_priced_in_the_tokens_of_the_batch() -> None:
    """More draft tokens than were ever verified cost in proportion."""
    made = taught(1, 4)
    prices = made.prices(1, 50.0)
    assert prices[4] == pytest.approx(4 * DRAFT_S * 50.0, rel=0.1)
    assert prices[10] == pytest.approx(2.5 * prices[4]) and prices[0] == 0.0
    assert made.prices(1, 100.0) == pytest.approx([2.0 * price for price in prices])


def test_the_heads_pass_is_learnt_apart_from_what_it_verifies() -> None:
    assert costs().pass_seconds(1, 2) == (0.0, 0.0)
    made = taught(1, 3, k=3)
    assert made.pass_seconds(1, 3) == (pytest.approx(PASS_S, rel=0.1), 0.0)
    verified = made.verification.row(1)[3].seconds
    assert verified == pytest.approx(PLAIN_S + 3 * DRAFT_S, rel=0.02)


@pytest.mark.parametrize("reading", ["prompt", "missed"])
def test_a_pass_that_reads_more_tells_nothing_of_passes(reading: str) -> None:
    """The fault: what the head had missed while lookups drafted, and then read, was taken for the
    cost of its pass, which has a price of its own in a plan."""
    made = taught(1, 3, k=3)
    before = made.pass_seconds(1, 3)
    slow = step(1, 3, k=3)._replace(draft_seconds=5 * PASS_S)
    if reading == "prompt":
        slow = slow._replace(load=slow.load._replace(prefill_tokens=40))
    else:
        slow = slow._replace(missed_tokens_read=40)
    for _ in range(50):
        made.observe(slow, 0.0, settled=True)
    assert made.pass_seconds(1, 3) == before


def test_further_requests_of_a_pass_share_what_it_takes_longer() -> None:
    made = taught(1, 3, k=3)
    for _ in range(300):
        longer = step(4, 12, k=3)._replace(draft_seconds=2.5 * PASS_S)
        made.observe(longer._replace(seconds=longer.seconds + 1.5 * PASS_S), 0.0, settled=True)
    one, further = made.pass_seconds(4, 3)
    assert one + 3 * further == pytest.approx(2.5 * PASS_S, rel=0.05)


def test_a_batch_that_makes_more_tokens_pays_more_for_a_second() -> None:
    """The rate is that of the recent steps, where they were of about this batch."""
    made = costs()
    for _ in range(100):
        made.observe(step(4, 40, tokens=40), 0.0, settled=True)
    expected = 40 / (PLAIN_S + 40 * DRAFT_S)
    assert made.tokens_per_second(Load(4), 200.0) == pytest.approx(expected, rel=0.05)
    assert made.tokens_per_second(Load(1), 50.0) == 50.0


def test_the_rate_begins_at_the_one_that_is_expected() -> None:
    """Catches: a lucky first step that sets all prices by itself."""
    made = costs()
    made.observe(step(4, 0, tokens=8), 0.0, settled=True)
    prior_s = Tuning().rate_prior_tokens * 4 / 200.0
    expected = (8 + prior_s * 200.0) / (PLAIN_S + prior_s)
    assert made.tokens_per_second(Load(4), 200.0) == pytest.approx(expected)


def test_plain_steps_are_known_from_the_pace_of_those_with_lookups() -> None:
    """The machine slows down by a half, while no step is without drafts."""
    made = taught(4, 40)
    for _ in range(300):
        slow = step(4, 40)
        made.observe(slow._replace(seconds=1.5 * slow.seconds), 0.0, settled=True)
    assert made.plain_seconds(4) == pytest.approx(1.5 * PLAIN_S, rel=0.3)


def test_a_plain_step_just_after_drafts_tells_nothing_of_plain_steps() -> None:
    made, slow = costs(), step(1, 0)._replace(seconds=2.0 * PLAIN_S)
    before = made.plain_seconds(1)
    for _ in range(50):
        made.observe(slow, 0.0, settled=False)
    assert made.plain_seconds(1) == before
    for _ in range(50):
        made.observe(slow, 0.0, settled=True)
    assert made.plain_seconds(1) == pytest.approx(2.0 * PLAIN_S, rel=0.1)
