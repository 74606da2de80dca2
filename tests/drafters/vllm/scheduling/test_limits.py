"""Which requests get drafts, and how many."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from drafters.config import MAX_K, REPORT_STEPS, REPORT_TOKENS
from drafters.vllm.scheduling.limits import draft_limit, follows_counts, within_budget


@pytest.mark.parametrize(
    ("options", "v1", "v2"),
    [
        ({}, 7, 7),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}, 7, 7),
        ({"presence_penalty": 1.0, "min_tokens": 5, "bad_words": ["no"]}, 7, 7),
        # V2 applies all parameters to drafted rows.
        ({"logit_bias": {5: 1.0}}, 0, 7),
        ({"min_p": 0.1}, 0, 7),
        ({"extra_args": {MAX_K: 3}, "min_p": 0.2}, 0, 3),
        ({"extra_args": {MAX_K: 3}}, 3, 3),
        ({"extra_args": {MAX_K: 0}}, 0, 0),
        ({"extra_args": {MAX_K: 99}}, 7, 7),
        ({"extra_args": {"session_id": "a"}}, 7, 7),
        (None, 0, 0),  # a request that samples nothing
    ],
)
def test_the_limit_of_a_request(options: dict[str, Any] | None, v1: int, v2: int) -> None:
    params = None if options is None else SamplingParams(**options)
    assert (draft_limit(params, 7), draft_limit(params, 7, v2=True)) == (v1, v2)


@pytest.mark.parametrize(
    ("options", "follows"),
    [
        ({}, False),
        ({"stop": ["."]}, True),
        ({"stop_token_ids": [3]}, False),  # the engine core ends these itself
        ({"extra_args": {MAX_K: 2}}, False),
        ({"extra_args": {REPORT_TOKENS: 1}}, True),
        ({"extra_args": {REPORT_STEPS: 1}}, False),  # every few steps
    ],
)
def test_whose_counts_the_gateway_follows(options: dict[str, Any], follows: bool) -> None:
    assert follows_counts(SamplingParams(**options)) is follows
    assert not follows_counts(None)


@pytest.mark.parametrize(
    ("drafts", "before", "start", "budget", "most"),
    [
        ([1, 2, 3, 4], [], [9], 1, 4),
        ([9, 2, 3, 4], [], [9], 0, 0),
        ([9, 2, 3, 4], [], [9], 1, 1),  # the token behind the draft is the budget
        ([9, 2, 3, 4], [], [9], 3, 3),
        ([1, 9, 3, 4], [], [9], 1, 2),
        ([1, 9, 3, 4], [], [9], 9, 4),
        ([1, 8, 9, 4], [7], [8, 9], 0, 2),
        ([9, 2, 3, 4], [8], [8, 9], 2, 2),  # it began in front of the drafts
        ([9, 2, 3, 4], [7], [8, 9], 0, 4),
        ([1, 2], [8], [8, 9], 0, 2),
    ],
)
def test_drafts_end_where_reasoning_has_its_budget(
    drafts: list[int], before: list[int], start: list[int], budget: int, most: int
) -> None:
    assert within_budget(drafts, before, start, budget) == most
