"""Lookups of one request: what a match was worth, and what it drafts."""

from __future__ import annotations

import numpy as np

from drafters.control.policy import Match
from drafters.lookup.request_lookup import RequestLookup
from drafters.lookup.text_index import TextMatch


def lookup(*tokens: int, most: int = 4) -> RequestLookup:
    return RequestLookup(np.array(tokens, np.int32), most)


def test_a_match_is_compared_with_the_tokens_that_came() -> None:
    request = lookup(1, 2, 3, 4, 5, 9, 1, 2)
    assert request.match == TextMatch(2, 2)
    assert request.draft(3) == [3, 4, 5]
    assert request.advance([3, 4, 8]) == Match(length=2, compared=3, equal=2)
    assert request.match is None
    assert request.advance([9, 1]) is None
    assert (len(request), request.newest) == (13, 1)
    assert request.match == TextMatch(2, 7)


def test_no_more_is_compared_than_a_lookup_would_draft() -> None:
    request = lookup(1, 2, 3, 4, 5, 6, 7, 8, 1, 2, most=4)
    assert request.advance([3, 4, 5, 6, 7]) == Match(2, 4, 4)


def test_a_repetition_that_overlaps_its_copy_is_right_as_long_as_it_lasts() -> None:
    request = lookup(8, 8, 8)
    assert request.draft(4) == [8, 8, 8, 8]
    assert request.advance([8, 8, 8, 1]) == Match(2, 4, 3)
