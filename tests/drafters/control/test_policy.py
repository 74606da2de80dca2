"""What a load says about draft tokens."""

from __future__ import annotations

import pytest

from drafters.control.policy import Load, count_draft_limits


def test_limits_take_draft_tokens_away() -> None:
    """Catches: limits ignored. Of three requests one may have none, one two, one any number."""
    load = Load(3, requests_by_draft_limit=count_draft_limits([0, 2, 4], k_max=4))
    assert [load.draft_tokens_at(k) for k in range(5)] == [0, 2, 4, 5, 6]
    assert [load.requests_drafted_at(position) for position in range(4)] == [2, 2, 1, 1]


def test_without_limits_every_request_has_k() -> None:
    assert [Load(3).draft_tokens_at(k) for k in range(3)] == [0, 3, 6]
    assert Load(3).requests_drafted_at(9) == 3


@pytest.mark.parametrize(("draft_tokens", "k"), [(0, 0), (1, 1), (3, 1), (5, 2), (12, 4)])
def test_some_draft_tokens_are_never_those_of_k_zero(draft_tokens: int, k: int) -> None:
    """Catches: one draft token among three requests rounded to a plain step."""
    assert Load(3).mean_k(draft_tokens) == k
