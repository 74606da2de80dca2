"""Drafting changes speed, never text: greedy output equals the plain gateway's, token by token."""

from __future__ import annotations

import httpx

from .gateway import MODEL
from .prompts import PROMPTS
from .wire import JSON

TOKENS = 128


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


def test_greedy_output_is_the_same_with_and_without_drafts(
    http: httpx.Client, plain_http: httpx.Client
) -> None:
    assert len(PROMPTS) == 32
    reports: list[str] = []
    for number, prompt in enumerate(PROMPTS):
        drafted, plain = greedy(http, prompt), greedy(plain_http, prompt)
        if drafted != plain:
            reports.append(explain(plain_http, number, drafted, plain))
    assert not reports, "\n".join([f"{len(reports)} of {len(PROMPTS)} outputs differ:", *reports])
