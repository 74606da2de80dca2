"""What was drafted for a request, in a header of its answer and nowhere in its body."""

from __future__ import annotations

import httpx
import pytest

from .gateway import MODEL


def drafts(response: httpx.Response) -> dict[str, float]:
    parts = response.headers["x-aerie-speculation"].split(", ")
    return {name: float(value) for name, value in (part.split("=") for part in parts)}


@pytest.mark.parametrize("choices", [1, 3])
def test_the_header_agrees_with_the_answer(http: httpx.Client, choices: int) -> None:
    body = {
        "model": MODEL, "prompt": "def read(", "max_tokens": 40, "n": choices, "ignore_eos": True,
        "temperature": 0, "speculation": {"max_k": 2},
    }  # fmt: skip
    http.patch("/v1/speculation", json={"objective": "fixed", "k": 3}).raise_for_status()
    try:
        response = http.post("/v1/completions", json=body)
    finally:
        http.patch("/v1/speculation", json={"objective": "throughput"})
    told = drafts(response)
    assert "metrics" not in response.json()
    assert 0 < told["accepted"] <= told["drafted"]
    assert 1 < told["k"] <= 2
    assert 1 < told["length"] <= 3
    # Every step made one token of the target's own and those that were accepted.
    steps = told["drafted"] / told["k"]
    assert told["length"] == pytest.approx(1 + told["accepted"] / steps, abs=0.02)
    assert told["accepted"] < response.json()["usage"]["completion_tokens"] == 40 * choices


def test_no_drafts(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4, "speculation": {"enabled": False}}
    response = http.post("/v1/completions", json=body)
    assert response.headers["x-aerie-speculation"] == "drafted=0, accepted=0"
