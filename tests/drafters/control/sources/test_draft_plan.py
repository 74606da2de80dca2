"""Which source drafts for each request, given what the drafts of each are worth."""

from __future__ import annotations

from typing import Any

import pytest

from drafters.control.sources.draft_plan import (
    MATCH_CLASSES,
    Candidate,
    DraftPlan,
    Worth,
    choose_sources,
    match_class,
)

K = 3
NOTHING = (Worth(),) * len(MATCH_CLASSES)


def plan(worth: dict[int, Worth] | None = None, **values: Any) -> DraftPlan:
    """A plan in which a pass for one request costs half of a token, and each further one 0.1."""
    lookups = list(NOTHING)
    for length, entry in (worth or {}).items():
        lookups[match_class(length)] = entry
    defaults = {"head_k": K, "head_gain": 0.8, "alone_gain": 0.9}
    prices = {"pass_price": 0.5, "further_price": 0.1}
    return DraftPlan(tuple(lookups), **{**defaults, **prices, **values})


@pytest.mark.parametrize(
    ("length", "place"), [(2, 0), (3, 1), (4, 2), (5, 3), (6, 3), (7, 4), (15, 5), (16, 6)]
)
def test_a_match_belongs_to_the_class_of_the_next_shorter_length(length: int, place: int) -> None:
    assert match_class(length) == place


def test_without_matches_the_head_drafts_at_the_k_that_was_chosen() -> None:
    """However dear its pass seems: K was chosen with that in view."""
    found = choose_sources(plan(pass_price=9.0), K, [Candidate(10), Candidate(10)])
    assert found == (K, (True, True), (0, 0))
    assert choose_sources(plan(), 0, [Candidate(10)]) == (0, (False,), (0,))


def test_each_request_has_its_better_source() -> None:
    worth = {2: Worth(1, 0.1), 16: Worth(10, 6.0)}
    candidates = [Candidate(10, match=2), Candidate(10, match=16), Candidate(10), Candidate(4, 16)]
    found = choose_sources(plan(worth), K, candidates)
    assert found == (K, (True, False, True, False), (0, 10, 0, 4))


def test_a_pass_that_gains_less_than_its_price_is_skipped() -> None:
    """One request would gain 0.8 tokens of a pass for half a token; at twice the price it has
    none, and what the lookups leave of the head's gain does not pay for it either."""
    worth = {5: Worth(4, 0.7), 16: Worth(10, 6.0)}
    copies, none = [Candidate(10, match=16), Candidate(10, match=5)], Candidate(10)
    assert choose_sources(plan(worth), K, copies).k == 0
    assert choose_sources(plan(worth), K, [*copies, none]).head == (False, True, True)
    dear = choose_sources(plan(worth, pass_price=1.0), K, [*copies, Candidate(10)])
    assert dear == (0, (False,) * 3, (10, 4, 0))


def test_beside_lookups_the_head_drafts_as_many_as_pay_there() -> None:
    worth = {16: Worth(10, 6.0)}
    both = [Candidate(10, match=16), Candidate(10)]
    assert choose_sources(plan(worth, head_k=1), K, both).k == 1
    assert choose_sources(plan(worth, head_k=0, head_gain=0.0), K, both).k == 0


def test_a_request_that_may_have_no_drafts_has_none() -> None:
    worth = {16: Worth(10, 6.0)}
    found = choose_sources(plan(worth), K, [Candidate(0, match=16), Candidate(0)])
    assert found == (0, (False, False), (0, 0))


def test_prompts_are_read_and_then_the_head_drafts_too() -> None:
    worth = {16: Worth(10, 6.0)}
    candidates = [Candidate(10, match=16), Candidate(10)]
    assert choose_sources(plan(worth, pass_price=5.0), K, candidates).k == 0
    found = choose_sources(plan(worth, pass_price=5.0), K, candidates, reads_prompts=True)
    assert found.head == (False, True)


@pytest.mark.parametrize("values", [{}, {"head_k": 0, "head_gain": 0.0}])
def test_a_pass_that_only_reads_prompts_has_the_k_that_was_chosen(values: dict[str, Any]) -> None:
    """The fault: such a step counted as one at K = 0, and the head's reading as a part of what
    steps take without it."""
    candidates = [Candidate(10, match=16), Candidate(0)]
    chosen = plan({16: Worth(10, 6.0)}, **values)
    assert choose_sources(chosen, K, candidates, reads_prompts=True) == (K, (False,) * 2, (10, 0))
    assert choose_sources(chosen, 0, candidates, reads_prompts=True).k == 0


def test_the_head_catches_up_once_it_would_have_gained_what_that_costs() -> None:
    """100 tokens at 0.02 cost two tokens, which the head gains in three steps."""
    candidates = [Candidate(10, unread=100), Candidate(10)]
    ran = [choose_sources(plan(read_price=0.02), K, candidates).head for _ in range(3)]
    assert ran == [(False, True), (False, True), (True, True)]
    assert [each.forgone for each in candidates] == [0.0, 0.0]
