"""What was drafted for a request: in a header of its answer, in its body as vLLM tells it, and for
each of its tokens."""

from __future__ import annotations

import httpx
import pytest

from .bodies import greedy
from .gateway import MODEL
from .prompts import REPEATED
from .wire import metric, post_chunks


def drafts(response: httpx.Response) -> dict[str, float]:
    parts = response.headers["x-aerie-speculation"].split(", ")
    return {name: float(value) for name, value in (part.split("=") for part in parts)}


@pytest.mark.usefixtures("fixed_k")
@pytest.mark.parametrize("choices", [1, 3])
def test_the_header_agrees_with_the_answer(http: httpx.Client, choices: int) -> None:
    body = greedy(max_tokens=40, n=choices, speculation={"max_k": 2})
    response = http.post("/v1/completions", json=body)
    told = drafts(response)
    if choices == 1:
        figures = response.json()["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] == told["accepted"]
        assert figures["num_draft_tokens"] == told["drafted"]
        assert "per_step_accepted" not in figures
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


def counters(http: httpx.Client) -> list[float]:
    """Draft tokens verified and accepted so far."""
    names = ("num_draft_tokens", "num_accepted_tokens")
    return [metric(http, f"vllm:spec_decode_{name}_total") for name in names]


@pytest.mark.usefixtures("fixed_k")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
def test_tokens_sum_up_to_the_counters(http: httpx.Client, streamed: bool, choices: int) -> None:
    body = greedy(max_tokens=40, n=choices, speculation={"tokens": True})
    before = counters(http)
    if streamed:
        pieces = post_chunks(http, "/v1/completions", body)
        parts = [choice for piece in pieces for choice in piece["choices"]]
    else:
        parts = http.post("/v1/completions", json=body).json()["choices"]
    drafted, accepted = (new - old for new, old in zip(counters(http), before, strict=True))
    told = [part["speculation"] for part in parts if "speculation" in part]
    tokens = [token for part in told for token in part["tokens"]]
    steps = [step for part in told for step in part["steps"]]
    assert "".join(token["text"] for token in tokens) == "".join(part["text"] for part in parts)
    assert len(tokens) == 40 * choices
    assert sum(step["drafted"] for step in steps) == drafted > 0
    assert sum(step["accepted"] for step in steps) == accepted > 0
    marked = sum(token["origin"] == "draft" for token in tokens)
    # What a last step had accepted beyond the limit has no token in the answer.
    assert 0 <= accepted - marked <= choices * max(step["drafted"] for step in steps)


def test_tokens_that_were_looked_up_are_told_apart(http: httpx.Client) -> None:
    """In the answer, and in what the engine counts by source."""
    body = greedy(REPEATED, 48, speculation={"tokens": True})
    changes = {"objective": "throughput", "sources": ["lookup"]}
    try:
        state = http.patch("/v1/speculation", json=changes).raise_for_status().json()
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        after = http.get("/v1/speculation").json()["totals"]["sources"]["lookup"]
    finally:
        http.patch("/v1/speculation", json={"sources": []}).raise_for_status()
    before, told = state["totals"]["sources"]["lookup"], choice["speculation"]
    assert {token["origin"] for token in told["tokens"]} == {"target", "lookup"}
    drafted = [step for step in told["steps"] if step["drafted"]]
    assert {step["source"] for step in drafted} == {"lookup"}
    assert sum(step["drafted"] for step in drafted) == after["drafted"] - before["drafted"]
    assert sum(step["accepted"] for step in drafted) == after["accepted"] - before["accepted"] > 0


@pytest.mark.usefixtures("fixed_k")
def test_a_stop_string_hides_nothing(http: httpx.Client) -> None:
    """The gateway ends the request itself, and the engine core sends no last counts."""
    body = {"model": MODEL, "prompt": "def read(", "max_tokens": 60, "temperature": 0}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    response = http.post(
        "/v1/completions", json={**body, "stop": [stop], "speculation": {"tokens": True}}
    )
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    steps, told = choice["speculation"]["steps"], drafts(response)
    assert sum(step["drafted"] for step in steps) == told["drafted"] > 0
    assert sum(step["accepted"] for step in steps) == told["accepted"]
    figures = response.json()["metrics"]["speculative_decoding"]
    assert figures["per_step_drafted"] == [s["drafted"] for s in steps if s["drafted"]]
    assert "".join(t["text"] for t in choice["speculation"]["tokens"]) == choice["text"]
