"""POST /v1/chat/completions without streaming."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import httpx
import openai
import pytest

from . import shapes
from .gateway import MODEL
from .wire import JSON, text_of

ASK: JSON = {"model": MODEL, "messages": [{"role": "user", "content": "def read_lines(path):"}]}
GREEDY: JSON = {**ASK, "temperature": 0, "ignore_eos": True, "max_tokens": 24}


def chat(http: httpx.Client, **changes: Any) -> JSON:
    response = http.post("/v1/chat/completions", json={**GREEDY, **changes})
    assert response.status_code == 200, response.text
    body: JSON = response.json()
    shapes.chat(body)
    return body


def test_the_client_gets_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=8
    )
    assert answer.model == MODEL
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.choices[0].message.content is not None
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 8


@pytest.mark.parametrize(("name", "tokens"), [("max_tokens", 33), ("max_completion_tokens", 7)])
def test_the_token_limit_is_exact(http: httpx.Client, name: str, tokens: int) -> None:
    """Several drafted tokens are accepted in one step: the limit cuts inside a step too."""
    response = http.post(
        "/v1/chat/completions", json={**ASK, "temperature": 0, "ignore_eos": True, name: tokens}
    )
    body = response.json()
    assert shapes.chat(body).choices[0].finish_reason == "length"
    assert body["usage"]["completion_tokens"] == tokens


def test_prompt_tokens_match_the_tokenizer(http: httpx.Client) -> None:
    counted = http.post("/tokenize", json={"model": MODEL, "messages": ASK["messages"]}).json()[
        "count"
    ]
    assert chat(http, max_tokens=1)["usage"]["prompt_tokens"] == counted


def test_without_a_limit_it_ends_with_the_context(http: httpx.Client, context_length: int) -> None:
    def ask(lines: int) -> JSON:
        messages = [{"role": "user", "content": "x = 1\n" * lines}]
        return {"model": MODEL, "messages": messages}

    few, more = (http.post("/tokenize", json=ask(n)).json()["count"] for n in (10, 110))
    lines = int((context_length - 40 - few) / (more - few) * 100) + 10
    # Near the end of the context, so that little is left to generate.
    request = {**ask(lines), "temperature": 0, "ignore_eos": True}
    response = http.post("/v1/chat/completions", json=request)
    assert response.status_code == 200, response.text
    body = response.json()
    assert shapes.chat(body).choices[0].finish_reason == "length"
    assert body["usage"]["total_tokens"] == context_length


def test_greedy_choices_are_equal(http: httpx.Client) -> None:
    """n > 1 with temperature 0 is legal, if pointless."""
    body = chat(http, n=3)
    texts = [c["message"]["content"] for c in body["choices"]]
    assert len(texts) == 3
    assert set(texts) == {text_of(chat(http))}
    assert body["usage"]["completion_tokens"] == 3 * 24


def test_sampled_choices_differ(http: httpx.Client) -> None:
    body = chat(http, n=4, temperature=1.5)
    assert len(body["choices"]) == 4
    assert len({c["message"]["content"] for c in body["choices"]}) > 1
    assert body["usage"]["completion_tokens"] == 4 * 24


@pytest.mark.parametrize("k", [0, 1, 2, 5, 20])
def test_top_logprobs_are_the_k_most_likely(http: httpx.Client, k: int) -> None:
    # Beyond its end the model may write special tokens, which a text leaves out unasked.
    body = chat(http, logprobs=True, top_logprobs=k, max_tokens=8, skip_special_tokens=False)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for token in content:
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
        values = [t["logprob"] for t in token["top_logprobs"]]
        assert len(values) == k
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(v) and v <= 1e-6 for v in [*values, token["logprob"]])
        if k:
            assert token["logprob"] == pytest.approx(values[0], abs=1e-3), (
                "greedy takes the most likely token"
            )


def test_fewer_top_logprobs_are_a_prefix_of_more(http: httpx.Client) -> None:
    few, many = (
        chat(http, logprobs=True, top_logprobs=k, max_tokens=6)["choices"][0]["logprobs"]
        for k in (2, 10)
    )
    for a, b in zip(few["content"], many["content"], strict=True):
        assert [t["logprob"] for t in a["top_logprobs"]] == pytest.approx(
            [t["logprob"] for t in b["top_logprobs"][:2]], abs=1e-3
        )


def test_an_unlikely_sample_is_not_forced_into_the_list(http: httpx.Client) -> None:
    """A sample from outside the top two must not displace one of them."""
    # By number: two tokens that are parts of characters may read alike.
    by_id: JSON = {"return_tokens_as_token_ids": True}
    body = chat(http, logprobs=True, top_logprobs=2, temperature=2.0, max_tokens=32, **by_id)
    content = body["choices"][0]["logprobs"]["content"]
    outside = 0
    for token in content:
        values = [t["logprob"] for t in token["top_logprobs"]]
        assert len(values) == 2
        assert values[0] >= values[1]
        assert token["logprob"] <= values[0] + 1e-3
        inside = [t["logprob"] for t in token["top_logprobs"] if t["token"] == token["token"]]
        assert inside == pytest.approx([token["logprob"]] * len(inside), abs=1e-3)
        outside += token["logprob"] < values[1] - 1e-3
    assert outside, "32 samples at temperature 2 never left the top two"


def test_no_logprobs_unless_asked(http: httpx.Client) -> None:
    assert chat(http)["choices"][0]["logprobs"] is None


def test_seed_repeats_a_sample(http: httpx.Client) -> None:
    """Promised for a request that is alone in the batch."""
    texts = [text_of(chat(http, seed=7, temperature=1.0)) for _ in range(4)]
    assert len(set(texts)) == 1, texts
    assert text_of(chat(http, seed=8, temperature=1.0)) != texts[0], "the seed is not used"


def test_text_parts_equal_plain_text(http: httpx.Client) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK["messages"][0]["content"]}]}]
    assert text_of(chat(http, messages=parts)) == text_of(chat(http))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}],
        [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "hi"}],
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three", "name": "ann"},
        ],
        [{"role": "user", "content": ""}],
        [
            {
                "role": "user",
                "content": "nul \x00, emoji \U0001f40d, <|endoftext|> <|im_start|> <s> </s>",
            }
        ],
    ],
    ids=["system", "developer", "turns", "empty", "odd-characters"],
)
def test_legal_conversations(http: httpx.Client, messages: list[JSON]) -> None:
    assert chat(http, messages=messages, max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_frequency_penalty_acts(http: httpx.Client) -> None:
    plain = chat(http, max_tokens=160, return_token_ids=True)
    ids = plain["choices"][0].get("token_ids")
    if ids is not None and max(Counter(ids).values()) < 8:
        pytest.skip("the model does not repeat itself enough for a penalty to show")
    assert text_of(chat(http, max_tokens=160, frequency_penalty=2.0)) != text_of(plain)
