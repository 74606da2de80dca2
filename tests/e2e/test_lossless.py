"""Drafting changes speed, never text: greedy output equals the plain gateway's, token by token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from .gateway import MODEL
from .prompts import PROMPTS
from .wire import JSON

TOKENS = 128
AT_ONCE = 8


def greedy(http: httpx.Client, prompt: str) -> list[int]:
    response = http.post(
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": TOKENS,
            "return_token_ids": True,
        },
    )
    assert response.status_code == 200, response.text
    ids = list(response.json()["choices"][0]["token_ids"])
    assert len(ids) == TOKENS
    return ids


def explain(plain_http: httpx.Client, number: int, drafted: list[int], plain: list[int]) -> str:
    """Where two outputs part, and how far apart the plain model holds the two candidates there."""
    at = next(i for i, (a, b) in enumerate(zip(drafted, plain, strict=True)) if a != b)
    prompt = plain_http.post("/tokenize", json={"model": MODEL, "prompt": PROMPTS[number]}).json()[
        "tokens"
    ]
    body: JSON = plain_http.post(
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": prompt + plain[:at],
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": 1,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        },
    ).json()
    top = body["choices"][0]["logprobs"]["top_logprobs"][0]
    ours, theirs = (top.get(f"token_id:{t}") for t in (drafted[at], plain[at]))
    gap = "beyond the top five" if ours is None or theirs is None else f"{theirs - ours:.6f}"
    tokens = f"{drafted[at]} with drafts, {plain[at]} without"
    return f"prompt {number}, position {at}: {tokens}; logprob gap {gap}"


@pytest.mark.usefixtures("fixed_k")
def test_greedy_output_is_the_same_with_and_without_drafts(
    http: httpx.Client, plain_http: httpx.Client
) -> None:
    """Batches differ, too: requests begin and end when others are in the middle."""
    assert len(PROMPTS) == 32
    with ThreadPoolExecutor(AT_ONCE) as pool:
        drafted = list(pool.map(partial(greedy, http), PROMPTS))
        plain = list(pool.map(partial(greedy, plain_http), PROMPTS))
    reports = [
        explain(plain_http, number, *texts)
        for number, texts in enumerate(zip(drafted, plain, strict=True))
        if texts[0] != texts[1]
    ]
    assert not reports, "\n".join([f"{len(reports)} of {len(PROMPTS)} outputs differ:", *reports])
