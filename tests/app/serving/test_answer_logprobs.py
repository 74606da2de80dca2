"""Tokens of log probabilities make up the text of the answer, however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.app.scripted_engine import Client

TEXT = "def area(width):\n    return width * 2\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
RESPONSE_TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
COMPLETION = {"prompt": "Hi", "logprobs": 2}
RESPONSE = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
END = "<|im_end|>"


@pytest.fixture(scope="module")
def client() -> Client:
    return Client(tool_call_parser="hermes")


@pytest.fixture(params=[(1,), (3, 1, 2), (100,)], ids=["one by one", "several", "at once"])
def steps(request: pytest.FixtureRequest, client: Client) -> None:
    client.engine.steps = request.param


def say(client: Client, script: str) -> list[str]:
    """Let the model say this; returns the text of each token."""
    client.engine.script = script
    return [client.engine.tokenizer.decode(token) for token in client.engine.tokens()]


def whole(client: Client, operation: str, body: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(client.answer(operation, {"max_tokens": 200, **body}))


def streamed(client: Client, operation: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return asyncio.run(client.events(operation, {"max_tokens": 200, **body}))


def of_chat(client: Client, body: dict[str, Any]) -> list[tuple[str, list[str], str, int]]:
    """(text, tokens, finish reason, completion tokens), of a whole and of a streamed answer."""
    answer = whole(client, "chat", {**CHAT, **body})
    [choice] = answer["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    count = answer["usage"]["completion_tokens"]
    found = [(choice["message"]["content"] or "", tokens, choice["finish_reason"], count)]
    options = {"stream_options": {"include_usage": True}}
    *events, last = streamed(client, "chat", {**CHAT, **body, **options})
    chunks = [event["choices"][0] for event in events]
    text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    entries = [e for chunk in chunks for e in (chunk.get("logprobs") or {}).get("content", ())]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    reason = chunks[-1]["finish_reason"]
    tokens = [entry["token"] for entry in entries]
    return [*found, (text, tokens, reason, last["usage"]["completion_tokens"])]


def of_completion(client: Client, body: dict[str, Any]) -> list[tuple[str, list[str], str, int]]:
    answer = whole(client, "completions", {**COMPLETION, **body})
    [choice] = answer["choices"]
    count = answer["usage"]["completion_tokens"]
    found = [(choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"], count)]
    assert choice["logprobs"]["text_offset"] == offsets(choice["logprobs"]["tokens"])
    options = {"stream_options": {"include_usage": True}}
    *events, last = streamed(client, "completions", {**COMPLETION, **body, **options})
    chunks = [event["choices"][0] for event in events]
    tokens = [token for chunk in chunks for token in chunk["logprobs"]["tokens"]]
    assert [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]] == offsets(tokens)
    text = "".join(chunk["text"] for chunk in chunks)
    count = last["usage"]["completion_tokens"]
    return [*found, (text, tokens, chunks[-1]["finish_reason"], count)]


def of_response(client: Client, body: dict[str, Any]) -> list[tuple[str, list[str], str, int]]:
    """As `of_chat`; a stream's deltas, its items and its last response agree."""
    body = {**RESPONSE, "max_output_tokens": 200, "max_tokens": None, **body}
    if body["max_tokens"] is not None:
        body["max_output_tokens"], body["max_tokens"] = body["max_tokens"], None
    found = [content_of(whole(client, "responses", body))]
    events = streamed(client, "responses", body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = content_of(events[-1]["response"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == last[0]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == last[1]
    parts = [event["part"] for event in events if event["type"] == "response.content_part.done"]
    parts = [part for part in parts if part["type"] == "output_text"]
    assert [entry["token"] for part in parts for entry in part["logprobs"]] == last[1]
    return [*found, last]


def content_of(response: dict[str, Any]) -> tuple[str, list[str], str, int]:
    parts = [
        part for item in response["output"] if item["type"] == "message" for part in item["content"]
    ]
    entries = [entry for part in parts for entry in part["logprobs"]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    return (
        "".join(part["text"] for part in parts),
        [entry["token"] for entry in entries],
        "stop" if response["status"] == "completed" else "length",
        response["usage"]["output_tokens"],
    )


def offsets(tokens: list[str]) -> list[int]:
    return [sum(map(len, tokens[:index])) for index in range(len(tokens))]


ALL = pytest.mark.parametrize(
    "read", [of_chat, of_completion, of_response], ids=["chat", "completions", "responses"]
)


@ALL
def test_the_end_token_is_not_among_them(client: Client, steps: None, read: Any) -> None:
    tokens = say(client, TEXT)
    assert tokens[-1] == END
    for text, told, reason, count in read(client, {}):
        assert (text, told, reason) == (TEXT, tokens[:-1], "stop")
        assert count == len(tokens)  # it was generated


@ALL
def test_at_the_token_limit_all_of_them_are(client: Client, steps: None, read: Any) -> None:
    tokens = say(client, TEXT)
    for text, told, reason, count in read(client, {"max_tokens": 4}):
        assert ("".join(told), told, reason, count) == (text, tokens[:4], "length", 4)


@ALL
@pytest.mark.parametrize("stop", ["\n    return", "width *", " 2"])
def test_a_stop_string_is_not_among_them(client: Client, steps: None, read: Any, stop: str) -> None:
    """A token that the stop string cuts is: a part of it is in the text."""
    tokens = say(client, TEXT)
    expected = TEXT.partition(stop)[0]
    for text, told, reason, _ in read(client, {"stop": [stop]}):
        assert (text, reason) == (expected, "stop")
        assert told == tokens[: len(told)]
        assert len("".join(told[:-1])) < len(text) <= len("".join(told))


@ALL
def test_a_stop_string_in_the_output_is_among_them(client: Client, steps: None, read: Any) -> None:
    tokens = say(client, TEXT)
    body = {"stop": ["return"], "include_stop_str_in_output": True}
    for text, told, _, _ in read(client, body):
        assert text == TEXT[: TEXT.index("return") + len("return")]
        assert told == tokens[: len(told)]
        assert len("".join(told[:-1])) < len(text) <= len("".join(told))


@ALL
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_the_end_token_is_told_where_the_text_has_it(
    client: Client, steps: None, read: Any, included: bool, skipped: bool
) -> None:
    tokens = say(client, TEXT)
    body = {"include_stop_str_in_output": included, "skip_special_tokens": skipped}
    shown = included and not skipped
    for text, told, _, _ in read(client, body):
        assert text == TEXT + (END if shown else "")
        assert told == (tokens if shown else tokens[:-1])


@ALL
def test_special_tokens_within_an_answer(client: Client, steps: None, read: Any) -> None:
    """As with `ignore_eos`, where the model goes on behind its end."""
    tokens = say(client, f"a{END}b{END}c")
    for text, told, _, _ in read(client, {"ignore_eos": True}):
        assert (text, told) == ("abc", [token for token in tokens if token != END])
    for text, told, _, _ in read(client, {"ignore_eos": True, "skip_special_tokens": False}):
        assert "".join(told) == text
        assert text.startswith(f"a{END}b{END}c")


@ALL
def test_characters_of_several_tokens(client: Client, steps: None, read: Any) -> None:
    say(client, "é 漢字 🙂 ok")
    for text, told, _, _ in read(client, {}):
        assert "".join(told) == text == "é 漢字 🙂 ok"


@ALL
def test_an_empty_answer_has_none(client: Client, steps: None, read: Any) -> None:
    say(client, "")
    for text, told, _, count in read(client, {}):
        assert (text, told, count) == ("", [], 1)


def test_a_tool_call_ends_without_the_end_token(client: Client, steps: None) -> None:
    tokens = say(client, CALL)
    for _, told, reason, _ in of_chat(client, {"tools": TOOLS}):
        assert (told, reason) == (tokens[:-1], "tool_calls")


def test_each_choice_has_its_own(client: Client, steps: None) -> None:
    tokens = say(client, TEXT)
    answer = whole(client, "chat", {**CHAT, "n": 3, "temperature": 1.0})
    for choice in answer["choices"]:
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == tokens[:-1]


@pytest.mark.parametrize(
    "script",
    [
        "Hi.",
        "Hi." + CALL,
        "é 漢字 🙂" + CALL,
        "a < b <tool" + CALL,
        "Hi." + CALL + "Hi.",
        CALL,
    ],
)
def test_those_of_a_response_are_of_its_content(client: Client, steps: None, script: str) -> None:
    """Catches: positions of a call on the text before it, and none for `<`, which may begin one."""
    say(client, script)
    for text, told, _, _ in of_response(client, {"tools": RESPONSE_TOOLS}):
        assert text == script.partition(CALL)[0]  # the parser drops what comes behind a call
        assert "".join(told) == text


@pytest.mark.parametrize("steps", [(1,), (3, 1, 2), (100,)])
def test_those_of_reasoning_are_not_of_the_content(steps: tuple[int, ...]) -> None:
    client = Client(reasoning_parser="qwen3")
    client.engine.steps = steps
    say(client, "<think>Hi. 漢字</think>\n\nHi. 漢字")
    for text, told, _, _ in of_response(client, {}):
        assert text.strip() == "Hi. 漢字"
        assert "".join(told) == text
    for text, told, _, _ in of_response(client, {"include_reasoning": False}):
        assert (text.strip(), told) == ("Hi. 漢字", [])
