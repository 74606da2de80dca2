"""Requests that cannot be honoured: a 4xx that names the field, streaming or not."""

from __future__ import annotations

import socket

import httpx
import openai
import pytest

from . import shapes
from .bodies import CHAT, COMPLETIONS, PATHS, RESPONSES, STREAMING, VALID, send
from .gateway import MODEL
from .wire import JSON, assert_error

# Of each kind of refusal, one that shows that it reaches the client; the others, value by value:
# tests/app/validation.
FIELDS: dict[str, tuple[str, JSON, set[str]]] = {
    "messages-an-object": (CHAT, {"messages": {"role": "user", "content": "hi"}}, {"messages"}),
    "message-null": (CHAT, {"messages": [None]}, {"messages[0]"}),
    "message-empty": (CHAT, {"messages": [{}]}, {"messages[0]", "messages[0].role"}),
    "role-a-number": (CHAT, {"messages": [{"role": 5, "content": "x"}]}, {"messages[0].role"}),
    "content-null": (
        CHAT,
        {"messages": [{"role": "user", "content": None}]},
        {"messages[0].content"},
    ),
    "content-an-object": (
        CHAT,
        {"messages": [{"role": "user", "content": {"text": "x"}}]},
        {"messages[0].content"},
    ),
    "second-message-wrong": (
        CHAT,
        {"messages": [{"role": "user", "content": "x"}, {"role": "nobody", "content": "x"}]},
        {"messages[1].role"},
    ),
    "stop-of-numbers": (CHAT, {"stop": [5]}, {"stop", "stop[0]"}),
    "stop-a-megabyte": (CHAT, {"stop": "x" * 2**20}, {"stop"}),
    "stream-a-word": (
        CHAT,
        {"stream_options": {"include_usage": "perhaps"}},
        {"stream_options", "stream_options.include_usage"},
    ),
    "stream-options-a-list": (CHAT, {"stream_options": []}, {"stream_options"}),
    "logprobs-a-word": (CHAT, {"logprobs": "perhaps"}, {"logprobs"}),
    "top-logprobs-alone": (CHAT, {"top_logprobs": 2}, {"top_logprobs", "logprobs"}),
    "logit-bias-word-ids": (CHAT, {"logit_bias": {"word": 1}}, {"logit_bias", "logit_bias.word"}),
    "logit-bias-absent-id": (CHAT, {"logit_bias": {"999999999": 1}}, {"logit_bias"}),
    "logit-bias-negative-id": (CHAT, {"logit_bias": {"-1": 1}}, {"logit_bias"}),
    "model-a-number": (CHAT, {"model": 5}, {"model"}),
    "template-of-a-client": (CHAT, {"chat_template": "{{ 1 }}"}, {"chat_template"}),
    "regex-too-long": (
        CHAT, {"structured_outputs": {"regex": "a" * 5000}}, {"structured_outputs"},
    ),
    "prompt-null": (COMPLETIONS, {"prompt": None}, {"prompt"}),
    "prompt-a-number": (COMPLETIONS, {"prompt": 5}, {"prompt"}),
    "prompt-an-object": (COMPLETIONS, {"prompt": {"text": "x"}}, {"prompt"}),
    "prompt-empty-list": (COMPLETIONS, {"prompt": []}, {"prompt"}),
    "prompt-empty-ids": (COMPLETIONS, {"prompt": [[]]}, {"prompt", "prompt[0]"}),
    "prompt-mixed": (COMPLETIONS, {"prompt": ["a", [1]]}, {"prompt", "prompt[0]", "prompt[1]"}),
    "prompt-half-ids": (COMPLETIONS, {"prompt": [1, "a"]}, {"prompt", "prompt[0]", "prompt[1]"}),
    "prompt-fractions": (COMPLETIONS, {"prompt": [1.5]}, {"prompt", "prompt[0]"}),
    "prompt-absent-id": (COMPLETIONS, {"prompt": [10**9]}, {"prompt", "prompt[0]"}),
    "prompt-surrogate": (COMPLETIONS, {"prompt": "\ud800"}, {"prompt"}),
    "best-of": (COMPLETIONS, {"best_of": 3}, {"best_of"}),
    "stop-ids-words": (
        COMPLETIONS,
        {"stop_token_ids": ["a"]},
        {"stop_token_ids", "stop_token_ids[0]"},
    ),
    "echo-a-word": (COMPLETIONS, {"echo": "perhaps"}, {"echo"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_cannot_be_honoured(http: httpx.Client, name: str) -> None:
    """A stream that has not begun ends with a status, as a whole answer does."""
    path, changes, params = FIELDS[name]
    assert_error(send(http, path, changes, streaming=True), 400, param=params)


@pytest.mark.parametrize("value", ["yes", 5, [], {}], ids=repr)
@PATHS
def test_stream_is_a_boolean(http: httpx.Client, path: str, value: object) -> None:
    assert_error(http.post(path, json={**VALID[path], "stream": value}), 400, param="stream")


@STREAMING
@PATHS
def test_an_unknown_model(http: httpx.Client, path: str, streaming: bool) -> None:
    response = send(http, path, {"model": "nope"}, streaming)
    error = assert_error(response, 404, param="model", code="model_not_found")
    assert "nope" in error["message"]


@STREAMING
@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input")]
)
def test_a_missing_prompt(http: httpx.Client, path: str, field: str, streaming: bool) -> None:
    assert_error(send(http, path, {}, streaming, drop=field), 400, param=field)


@STREAMING
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_an_over_long_prompt(
    http: httpx.Client, context_length: int, kind: str, streaming: bool
) -> None:
    prompts = {"text": "word " * 50 * context_length, "ids": [5] * (context_length + 1)}
    response = send(http, COMPLETIONS, {"prompt": prompts[kind]}, streaming)
    error = assert_error(response, 400, param="prompt", code="context_length_exceeded")
    assert str(context_length) in error["message"], "the message says how long it may be"


@STREAMING
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_media_for_a_text_model_is_never_fetched(
    http: httpx.Client, kind: str, streaming: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/secret.png"
        part = {"type": kind, kind: {"url": url, "data": "AAAA", "format": "wav", "file_id": "x"}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]
        response = send(http, CHAT, {"messages": messages}, streaming)
        with pytest.raises(BlockingIOError):  # nobody has connected, else it would be in the queue
            listener.accept()
    error = assert_error(response, 400)
    assert str(error["param"]).startswith("messages")


def test_an_unknown_field_is_refused(http: httpx.Client) -> None:
    response = send(http, CHAT, {"no_such_field": 1}, streaming=False)
    assert_error(response, 400, param="no_such_field", code="unknown_parameter")


@pytest.mark.parametrize("streaming", [False, True])
def test_the_client_raises_its_own_errors(client: openai.OpenAI, streaming: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            temperature=3,
            stream=streaming,
        )
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(
            model="nope", messages=[{"role": "user", "content": "hi"}], stream=streaming
        )
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


@PATHS
def test_afterwards_it_serves_as_before(http: httpx.Client, path: str) -> None:
    response = http.post(path, json=VALID[path])
    assert response.status_code == 200, response.text
    if path == CHAT:
        shapes.chat(response.json())
