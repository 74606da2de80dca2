"""Proof that the head really drafts, and that a gateway told not to does not."""

from __future__ import annotations

import httpx

from .gateway import MODEL
from .prompts import PROMPTS
from .wire import metric

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
GENERATED = "vllm:generation_tokens_total"
HEAD_K = 5


def generate(http: httpx.Client, prompt: str) -> None:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 64,
    }
    http.post("/v1/completions", json=body).raise_for_status()


def test_traffic_is_drafted_and_accepted(http: httpx.Client) -> None:
    http.patch("/v1/speculation", json={"objective": "fixed", "k": HEAD_K}).raise_for_status()
    before = {name: metric(http, name) for name in (DRAFTS, DRAFTED, ACCEPTED, GENERATED)}
    for prompt in PROMPTS[:8]:
        generate(http, prompt)
    http.patch("/v1/speculation", json={"objective": "throughput"}).raise_for_status()
    grown = {name: metric(http, name) - value for name, value in before.items()}
    length = 1 + grown[ACCEPTED] / grown[DRAFTS]
    print(f"acceptance length {length:.2f} over {grown[GENERATED]:.0f} tokens")
    assert grown[GENERATED] == 8 * 64
    assert grown[DRAFTED] == HEAD_K * grown[DRAFTS], "every draft has the head's five tokens"
    assert 0 < grown[ACCEPTED] <= grown[DRAFTED]
    assert grown[DRAFTS] < grown[GENERATED], "accepted drafts save steps"


def test_drafts_were_made_before_readiness(http: httpx.Client) -> None:
    """The warm-up request drafted: without that proof a gateway must not become ready."""
    assert metric(http, DRAFTED) > 0
