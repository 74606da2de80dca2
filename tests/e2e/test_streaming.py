"""Streaming chat: the order of chunks, and that they add up to the whole."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from . import shapes
from .gateway import MODEL
from .wire import JSON, chunks, post_chunks, stream, text_of

PATH = "/v1/chat/completions"
GREEDY: JSON = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "class Stack:"}],
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 48,
}


def whole(http: httpx.Client, **changes: Any) -> JSON:
    response = http.post(PATH, json={**GREEDY, **changes})
    assert response.status_code == 200, response.text
    body: JSON = response.json()
    return body


def contents(pieces: list[JSON], index: int = 0) -> str:
    return "".join(
        c["delta"].get("content") or "" for p in pieces for c in p["choices"] if c["index"] == index
    )


def test_the_shape_of_a_stream(http: httpx.Client) -> None:
    pieces = post_chunks(http, PATH, GREEDY)
    for piece in pieces:
        shapes.chunk(piece)
        assert len(piece["choices"]) == 1, "without include_usage every chunk has its choice"
        assert piece.get("usage") is None
    assert len({(p["id"], p["created"], p["model"]) for p in pieces}) == 1
    first, *rest = [p["choices"][0] for p in pieces]
    assert first["delta"]["role"] == "assistant"
    assert first["delta"].get("content") in {"", None}
    assert first["finish_reason"] is None
    assert all("role" not in c["delta"] for c in rest), "the role comes once"
    assert [c["finish_reason"] for c in rest if c["finish_reason"]] == ["length"]
    assert rest[-1]["finish_reason"] == "length", "nothing follows the end"
    assert sum(bool(c["delta"].get("content")) for c in rest) > 3, "one lump is no stream"


@pytest.mark.parametrize("tokens", [1, 2, 6, 7, 48, 150])
def test_streamed_text_equals_the_whole(http: httpx.Client, tokens: int) -> None:
    pieces = post_chunks(http, PATH, {**GREEDY, "max_tokens": tokens})
    assert contents(pieces) == text_of(whole(http, max_tokens=tokens))


def test_every_choice_streams(http: httpx.Client) -> None:
    pieces = post_chunks(http, PATH, {**GREEDY, "n": 3})
    choices = [c for p in pieces for c in p["choices"]]
    for index in range(3):
        mine = [c for c in choices if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert contents(pieces, index) == text_of(whole(http))
    assert {c["index"] for c in choices} == {0, 1, 2}


@pytest.mark.parametrize("length", [1, 4, 12])
def test_stop_never_leaks_into_the_stream(http: httpx.Client, length: int) -> None:
    """It may arrive spread over deltas of several tokens each: its start is held back."""
    full = text_of(whole(http, max_tokens=96))
    stop = full[len(full) // 2 :][:length]
    pieces = post_chunks(http, PATH, {**GREEDY, "max_tokens": 96, "stop": [stop]})
    assert contents(pieces) == full[: full.index(stop)]
    assert [c["finish_reason"] for p in pieces for c in p["choices"] if c["finish_reason"]] == [
        "stop"
    ]


def test_tokens_arrive_while_the_rest_is_made(http: httpx.Client) -> None:
    """Of a few answers, as a pause of this process delays what it reads."""
    shares = []
    for _ in range(3):
        events = stream(http, PATH, {**GREEDY, "max_tokens": 256})
        deltas = [piece["choices"][0]["delta"] for piece in chunks(events)]
        at_s = [e.at_s for e, d in zip(events, deltas, strict=False) if d.get("content")]
        shares.append(at_s[0] / at_s[-1])
    assert min(shares) < 0.5, "the text came at the end, all at once"


def test_the_client_reads_a_stream(client: openai.OpenAI) -> None:
    text = ""
    with client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    ) as pieces:
        for piece in pieces:
            text += "".join(c.delta.content or "" for c in piece.choices)
            usage = piece.usage
    assert usage is not None
    assert 1 <= usage.completion_tokens <= 8


def test_a_stop_string_that_never_comes_holds_no_text_back(http: httpx.Client) -> None:
    """Each chunk has the text of its tokens, however many of them the engine sends at once."""
    stop = "<|a stop string that is long and never comes|>"
    pieces = post_chunks(http, PATH, {**GREEDY, "logprobs": True, "stop": [stop]})
    choices = [c for p in pieces for c in p["choices"] if c["delta"].get("content")]
    assert len(choices) > 3, "one lump is no stream"
    for choice in choices:
        tokens = [t["token"] for t in choice["logprobs"]["content"]]
        ordinary = [token for token in tokens if not token.startswith("<|")]  # special: not shown
        assert choice["delta"]["content"] == "".join(ordinary)
