"""POST /v1/completions, and the tokenizer's routes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from . import shapes
from .gateway import MODEL
from .wire import JSON, assert_error, post_chunks, text_of

PROMPT = "import os\n\ndef main():\n    "
GREEDY: JSON = {
    "model": MODEL,
    "prompt": PROMPT,
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 16,
}


def complete(http: httpx.Client, **changes: Any) -> JSON:
    response = http.post("/v1/completions", json={**GREEDY, **changes})
    assert response.status_code == 200, response.text
    body: JSON = response.json()
    shapes.completion(body)
    return body


def tokens_of(http: httpx.Client, text: str, **options: Any) -> list[int]:
    response = http.post("/tokenize", json={"model": MODEL, "prompt": text, **options})
    assert response.status_code == 200, response.text
    return list(response.json()["tokens"])


def test_the_default_limit_is_sixteen_tokens(http: httpx.Client) -> None:
    body = http.post(
        "/v1/completions", json={"model": MODEL, "prompt": PROMPT, "ignore_eos": True}
    ).json()
    assert body["usage"]["completion_tokens"] == 16


def test_token_ids_equal_their_text(http: httpx.Client) -> None:
    ids = tokens_of(http, PROMPT)
    body = complete(http, prompt=ids)
    assert text_of(body) == text_of(complete(http))
    assert body["usage"]["prompt_tokens"] == len(ids)


def test_a_batch_keeps_its_order(http: httpx.Client) -> None:
    prompts = ["class A:\n", "for i in range(", "import sys\n"]
    alone = [text_of(complete(http, prompt=p)) for p in prompts]
    batch = complete(http, prompt=prompts)["choices"]
    assert [c["index"] for c in batch] == [0, 1, 2]
    assert [c["text"] for c in batch] == alone


def test_a_batch_of_token_ids(http: httpx.Client) -> None:
    prompts = ["class A:\n", "import sys\n"]
    body = complete(http, prompt=[tokens_of(http, p) for p in prompts])
    assert [c["text"] for c in body["choices"]] == [
        c["text"] for c in complete(http, prompt=prompts)["choices"]
    ]


def test_a_batch_with_n_numbers_every_choice(http: httpx.Client) -> None:
    body = complete(http, prompt=["a = ", "b = "], n=2)
    texts = [c["text"] for c in body["choices"]]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert body["usage"]["completion_tokens"] == 4 * 16


def test_echo_puts_the_prompt_first(http: httpx.Client) -> None:
    assert text_of(complete(http, echo=True)) == PROMPT + text_of(complete(http))


def test_echo_without_output_scores_the_prompt(http: httpx.Client) -> None:
    request = {**GREEDY, "echo": True, "max_tokens": 0, "logprobs": 1}
    # Not for the client's types: they have no null for the first score.
    body = http.post("/v1/completions", json=request).raise_for_status().json()
    assert text_of(body) == PROMPT
    assert body["usage"]["completion_tokens"] == 0
    scores = body["choices"][0]["logprobs"]["token_logprobs"]
    assert len(scores) == body["usage"]["prompt_tokens"]
    assert scores[0] is None
    assert all(s <= 1e-6 for s in scores[1:])


def test_streamed_echo_without_output_is_the_prompt(http: httpx.Client) -> None:
    options = {"echo": True, "max_tokens": 0, "stream_options": {"include_usage": True}}
    *pieces, last = post_chunks(http, "/v1/completions", {**GREEDY, **options})
    assert "".join(c["text"] for p in pieces for c in p["choices"]) == PROMPT
    assert last["usage"]["completion_tokens"] == 0


def test_stop_cuts_before_the_string(http: httpx.Client) -> None:
    full = text_of(complete(http, max_tokens=48))
    stop = full[len(full) // 2 :][:4]
    body = complete(http, max_tokens=48, stop=[stop])
    assert text_of(body) == full[: full.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("k", [0, 1, 5])
def test_legacy_logprobs(http: httpx.Client, k: int) -> None:
    body = complete(http, logprobs=k, max_tokens=8, return_tokens_as_token_ids=True)
    logprobs = body["choices"][0]["logprobs"]
    assert {len(logprobs[key]) for key in ("tokens", "token_logprobs", "text_offset")} == {8}
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        top = top or {}
        assert k <= len(top) <= k + 1, (
            "the k most likely, and the sampled token if it is not one of them"
        )
        if k:
            assert top[token] == value
            assert value == pytest.approx(max(top.values()), abs=1e-3), (
                "greedy takes the most likely token"
            )


def test_only_allowed_tokens_come_out(http: httpx.Client) -> None:
    allowed = tokens_of(http, "abc", add_special_tokens=False)
    body = complete(http, allowed_token_ids=allowed, return_token_ids=True)
    assert set(body["choices"][0]["token_ids"]) <= set(allowed)


def test_min_tokens_holds_back_a_stop_token(http: httpx.Client) -> None:
    def choice(**changes: Any) -> JSON:
        body = complete(http, max_tokens=32, return_token_ids=True, **changes)
        found: JSON = body["choices"][0]
        return found

    ids = choice()["token_ids"]
    assert len(ids) == 32
    early = choice(stop_token_ids=[ids[3]])
    assert early["finish_reason"] == "stop"
    assert early["token_ids"] == ids[: ids.index(ids[3]) + 1]
    late = choice(stop_token_ids=[ids[3]], min_tokens=16)["token_ids"]
    assert len(late) >= 16
    assert ids[3] not in late[:16]


def test_streamed_batch_equals_the_whole(http: httpx.Client) -> None:
    request = {
        **GREEDY,
        "prompt": ["class A:\n", "import sys\n"],
        "stream_options": {"include_usage": True},
    }
    whole = complete(http, prompt=request["prompt"])
    texts = ["", ""]
    ended: list[int] = []
    *pieces, last = post_chunks(http, "/v1/completions", request)
    for piece in pieces:
        for choice in piece["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                ended.append(choice["index"])
    assert texts == [c["text"] for c in whole["choices"]]
    assert sorted(ended) == [0, 1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 32


def test_streamed_echo_starts_with_the_prompt(http: httpx.Client) -> None:
    pieces = post_chunks(http, "/v1/completions", {**GREEDY, "echo": True})
    joined = "".join(c["text"] for p in pieces for c in p["choices"])
    assert joined == PROMPT + text_of(complete(http))


@pytest.mark.parametrize(
    "text", [PROMPT, "", "\ttabs\r\nand \u00e9, \U0001f40d, \u4f60\u597d", "a" * 2000]
)
def test_tokenize_and_back(http: httpx.Client, text: str) -> None:
    response = http.post(
        "/tokenize", json={"model": MODEL, "prompt": text, "add_special_tokens": False}
    )
    body = response.json()
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] > 0
    back = http.post("/detokenize", json={"model": MODEL, "tokens": body["tokens"]})
    assert back.status_code == 200
    assert back.json()["prompt"] == text


@pytest.mark.parametrize(
    "tokens", [[-1], [10**9], [2**63], ["a"], "a", None, [1.5], [[1]]], ids=repr
)
def test_detokenize_refuses_what_is_no_token(http: httpx.Client, tokens: object) -> None:
    assert_error(http.post("/detokenize", json={"model": MODEL, "tokens": tokens}), 400)


def test_invocations_stream(http: httpx.Client) -> None:
    pieces = post_chunks(http, "/invocations", GREEDY)
    assert "".join(c["text"] for p in pieces for c in p["choices"]) == text_of(complete(http))
