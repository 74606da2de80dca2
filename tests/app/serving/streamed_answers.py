"""Requests of each dialect, and checks that a stream adds up to the whole answer."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from pydantic import TypeAdapter

from tests.app.scripted_engine import Client

JSON = dict[str, Any]

PARAMETERS: JSON = {"type": "object", "properties": {"city": {"type": "string"}}}
STEPS = st.lists(st.integers(1, 12), min_size=1, max_size=4)
FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def chat_body(limit: int, tools: bool, **changes: Any) -> JSON:
    body: JSON = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": limit, **changes}
    if tools:
        body["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
            for name in ("f", "g")
        ]
    return body


def responses_body(limit: int, with_tools: bool, **changes: Any) -> JSON:
    body: JSON = {"input": "hi", "max_output_tokens": limit, **changes}
    if with_tools:
        body["tools"] = [
            {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False}
            for name in ("f", "g")
        ]
    return body


def messages_body(limit: int, tools: bool, **changes: Any) -> JSON:
    body: JSON = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": limit, **changes}
    if tools:
        body["tools"] = [{"name": name, "input_schema": PARAMETERS} for name in ("f", "g")]
    return body


def choices_of(choice: str) -> tuple[Any, Any, Any]:
    """`tool_choice` of chat, Responses and Messages for `auto`, `required` or `named`."""
    if choice == "named":
        function = {"name": "f"}
        chat = {"type": "function", "function": function}
        return chat, {"type": "function", **function}, {"type": "tool", **function}
    return choice, choice, {"type": "auto" if choice == "auto" else "any"}


def both(client: Client, operation: str, body: JSON, **streamed: Any) -> tuple[JSON, list[JSON]]:
    async def ask() -> tuple[JSON, list[JSON]]:
        whole = await client.answer(operation, body)
        return whole, await client.events(operation, {**body, **streamed})

    return asyncio.run(ask())


def chat_facts(choice: JSON) -> JSON:
    message = choice["message"]
    return {
        "content": message.get("content") or "",
        "calls": [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ],
        "finish_reason": choice["finish_reason"],
        "logprobs": (choice.get("logprobs") or {}).get("content"),
    }


def check_chat(client: Client, body: JSON) -> JSON:
    whole, chunks = both(client, "chat", body, stream_options={"include_usage": True})
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    added = state.current_completion_snapshot.model_dump(mode="json")
    facts = chat_facts(whole["choices"][0])
    assert chat_facts(added["choices"][0]) == facts
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert added["usage"][name] == whole["usage"][name]
    return facts


def item_facts(items: list[JSON]) -> list[JSON]:
    facts = []
    for item in items:
        text = "".join(part["text"] for part in item.get("content") or ())
        fact = {"type": item["type"], "status": item.get("status"), "text": text}
        fact |= {name: item.get(name) for name in ("name", "arguments", "input")}
        fact["logprobs"] = [
            entry["token"]
            for part in item.get("content") or ()
            for entry in part.get("logprobs") or ()
        ]
        facts.append(fact)
    return facts


def check_responses(client: Client, body: JSON) -> JSON:
    whole, events = both(client, "responses", body)
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    for name in ("status", "incomplete_details", "usage"):
        assert final[name] == whole[name]
    assert item_facts(final["output"]) == item_facts(whole["output"])
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            index = event["output_index"]
            texts[index] = texts.get(index, "") + event["delta"]
    for index, fact in enumerate(item_facts(done)):
        call = fact["arguments"] or fact["input"] or ""
        assert texts.get(index, "") == fact["text"] + call
    return whole


def statuses(response: JSON) -> list[str]:
    return [item["status"] for item in response["output"]]


def block_facts(blocks: list[JSON]) -> list[JSON]:
    names = ("type", "text", "name", "input")
    facts = [{name: block.get(name) for name in names} for block in blocks]
    text = "".join(fact["text"] or "" for fact in facts)
    return [{"text": text}, *(fact for fact in facts if fact["type"] != "text")]


def check_messages(client: Client, body: JSON) -> JSON:
    whole, events = both(client, "messages", body)
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        message = accumulate_event(
            event=adapter.validate_python(event), current_snapshot=message, json_bufs=buffers
        )
    added = message.model_dump(mode="json")
    assert block_facts(added["content"]) == block_facts(whole["content"])
    for name in ("stop_reason", "stop_sequence"):
        assert added[name] == whole[name]
    for name in ("input_tokens", "output_tokens"):
        assert added["usage"][name] == whole["usage"][name]
    return whole
