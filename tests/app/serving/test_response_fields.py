"""Answers have the fields of the published schemas and no others, but for a short list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from app.serving.response_fields import published
from tests.app.scripted_engine import Client
from tests.app.serving.streamed_answers import chat_body, responses_body
from tests.app.serving.test_whole_and_streamed import CALL

# Sampling settings that vLLM repeats beside those of the schema; the name of a function whose
# arguments are done.
ALLOWED = {"presence_penalty", "frequency_penalty", "name"}
OWN = {"kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages"}


@pytest.fixture(scope="module")
def client() -> Client:
    return Client(tool_call_parser="hermes")


def unknown(value: Any) -> Iterator[str]:
    """Names of fields that the client's types do not have."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from unknown(item)


@pytest.mark.parametrize("script", ["Hi.", "Hi." + CALL])
@pytest.mark.parametrize("limit", [5, 64])
def test_responses(client: Client, script: str, limit: int) -> None:
    client.engine.script, client.engine.steps = script, (3,)
    body = responses_body(limit, True, reasoning={"effort": "low"})
    whole = asyncio.run(client.answer("responses", body))
    assert set(unknown(Response.model_validate(whole))) <= ALLOWED
    assert not OWN & set(whole)
    assert whole["error"] is None
    assert whole["text"] == {"format": {"type": "text"}}
    assert "user" not in whole
    assert "mode" not in whole["reasoning"]
    assert all("defer_loading" not in tool for tool in whole["tools"])
    parts = [part for item in whole["output"] for part in item.get("content", ())]
    assert all(part["logprobs"] == [] for part in parts)
    assert not [name for name in whole["usage"]["input_tokens_details"] if "turn" in name]
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = asyncio.run(client.events("responses", body))
    for event in events:
        assert set(unknown(adapter.validate_python(event))) <= ALLOWED
        assert not OWN & set(event.get("response", ()))
    names = set(whole) - {"id", "created_at"}
    assert {name for name in events[-1]["response"] if name not in ("id", "created_at")} == names


def test_what_was_asked_for_stays() -> None:
    found = published({"input_messages": [], "user": "me", "text": {"verbosity": "low"}})
    assert found["input_messages"] == []
    assert found["user"] == "me"
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_tools_and_calls_have_no_null_that_the_schema_does_not_have() -> None:
    function = {"type": "function", "name": "f", "strict": None, "async": None}
    custom = {"type": "custom", "name": "g", "format": None, "async": None}
    inner = {**function, "defer_loading": None}
    namespace = {"type": "namespace", "name": "n", "description": "d", "tools": [inner]}
    call = {"type": "function_call", "name": "f", "arguments": "{}", "async": None}
    found = published(
        {"tools": [function, custom, namespace], "output": [call], "text": {"format": None}}
    )
    plain = {"type": "function", "name": "f", "strict": None}
    assert found["tools"] == [
        plain,
        {"type": "custom", "name": "g"},
        {**namespace, "tools": [plain]},
    ]
    assert found["output"] == [{"type": "function_call", "name": "f", "arguments": "{}"}]
    assert found["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize("script", ['"usage":"logprobs":{"content":', "Hi." + CALL])
def test_chat(client: Client, script: str) -> None:
    """Logprobs have a refusal, and chunks before the usage say that they have none."""
    client.engine.script, client.engine.steps = script, (2,)
    body = chat_body(64, True, logprobs=True)
    (choice,) = asyncio.run(client.answer("chat", body))["choices"]
    assert choice["logprobs"]["refusal"] is None
    chunks = asyncio.run(client.events("chat", body))
    assert not [chunk for chunk in chunks if "usage" in chunk]
    with_usage = asyncio.run(
        client.events("chat", {**body, "stream_options": {"include_usage": True}})
    )
    *before, last = with_usage
    assert all(chunk["usage"] is None for chunk in before)
    assert last["usage"]["completion_tokens"] == len(client.engine.tokens())
    logprobs = [c["choices"][0]["logprobs"] for c in before if c["choices"][0].get("logprobs")]
    assert logprobs
    assert all(entry["refusal"] is None for entry in logprobs)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in before)
    assert text == choice["message"]["content"]
