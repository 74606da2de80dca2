"""Drafts per request: the best there are, against brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.control.trim import trim

ROW = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2).map(
    lambda rates: [rates[0], rates[0] * rates[1]]
)


def rate(survival: list[list[float]], counts: list[int], base_s: float, draft_s: float) -> float:
    tokens = sum(1.0 + sum(row[:k]) for row, k in zip(survival, counts, strict=True))
    return tokens / (base_s + draft_s * sum(counts))


@given(st.lists(ROW, min_size=1, max_size=4), st.floats(0.001, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=80)
def test_no_other_choice_makes_more_tokens_per_second(
    survival: list[list[float]], base_s: float, draft_s: float
) -> None:
    counts = trim(survival, base_s, draft_s)
    found = rate(survival, counts, base_s, draft_s)
    top = max(
        rate(survival, list(other), base_s, draft_s)
        for other in product(range(3), repeat=len(survival))
    )
    assert found == pytest.approx(top)


def test_code_keeps_its_drafts_where_prose_loses_them() -> None:
    code, prose = [0.9**i for i in range(1, 6)], [0.5**i for i in range(1, 6)]
    assert trim([code, prose], base_s=1.0, draft_s=0.1) == [5, 1]


def test_requests_that_are_alike_and_drafts_for_nothing_are_not_trimmed() -> None:
    row = [0.8**i for i in range(1, 4)]
    assert trim([row] * 5, base_s=1.0, draft_s=0.0) == [3] * 5
    assert trim([row] * 5, base_s=1.0, draft_s=1.0) == [0] * 5
