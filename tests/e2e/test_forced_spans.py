"""Forced spans of grammars are drafted, and change no text: every kind of constraint, greedy and
with seeds, against the same gateway at K = 0."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import httpx
import pytest

from tests.drafters.vllm.scheduling.schemas import other_constraints, random_schema

from .gateway import MODEL, without_drafts

SCHEMAS = [{"json": random_schema(Random(seed))} for seed in range(8)]
CONSTRAINTS: list[dict[str, Any]] = [*other_constraints(), *SCHEMAS]
TOKENS = 96
AT_ONCE = 4


def answer(http: httpx.Client, constraint: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The answer's only choice."""
    response = http.post(
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": "The facts about the largest customer, as asked for:\n",
            "temperature": 0,
            "max_tokens": TOKENS,
            "structured_outputs": constraint,
            "return_token_ids": True,
            **changes,
        },
    )
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def accepted(http: httpx.Client) -> int:
    """Draft tokens of forced spans that were accepted so far."""
    return int(http.get("/v1/speculation").json()["totals"]["sources"]["grammar"]["accepted"])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seed"])
def test_texts_are_those_without_drafts(http: httpx.Client, sampling: dict[str, Any]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = partial(pool.map, partial(answer, http, **sampling))
        with without_drafts(http):
            plain = list(answers(CONSTRAINTS))
        before = accepted(http)
        drafted = list(answers(CONSTRAINTS))
    differ = [
        (constraint, one["text"], other["text"])
        for constraint, one, other in zip(CONSTRAINTS, drafted, plain, strict=True)
        if one["token_ids"] != other["token_ids"]
    ]
    assert not differ, f"{len(differ)} answers differ: {differ[:3]}"
    assert accepted(http) - before >= 2 * len(CONSTRAINTS)
