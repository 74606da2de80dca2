"""POST /v1/messages, in Anthropic's shape, through Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from .gateway import MODEL
from .wire import JSON, assert_anthropic_error, stream

PATH = "/v1/messages"
ASK: JSON = {
    "model": MODEL,
    "max_tokens": 24,
    "temperature": 0,
    "messages": [{"role": "user", "content": "def area("}],
}
REQUIRED = {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"}


def send(http: httpx.Client, **changes: Any) -> JSON:
    response = http.post(PATH, json={**ASK, **changes})
    assert response.status_code == 200, response.text
    body: JSON = response.json()
    Message.model_validate(body)
    return body


def text_of(body: JSON) -> str:
    return "".join(b["text"] for b in body["content"] if b["type"] == "text")


def test_required_fields_are_there(http: httpx.Client) -> None:
    body = send(http)
    assert set(body) >= REQUIRED
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    for block in body["content"]:
        assert block["type"] == "text"
        assert isinstance(block["text"], str)
        assert None not in [v for k, v in block.items() if k != "citations"], (
            f"a text block has no such field: {block}"
        )


def test_the_same_model_answers_here_and_in_chat(http: httpx.Client) -> None:
    chat = http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": ASK["messages"], "temperature": 0, "max_tokens": 24},
    ).json()
    body = send(http)
    assert text_of(body) == (chat["choices"][0]["message"]["content"] or "")
    assert body["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert (
        body["stop_reason"]
        == {"length": "max_tokens", "stop": "end_turn"}[chat["choices"][0]["finish_reason"]]
    )


@pytest.mark.parametrize(
    "system",
    ["Answer with one word.", [{"type": "text", "text": "Answer with one word."}]],
    ids=["text", "blocks"],
)
def test_system_reaches_the_model(http: httpx.Client, system: object) -> None:
    assert send(http, system=system)["usage"]["input_tokens"] > send(http)["usage"]["input_tokens"]


def test_blocks_equal_plain_text(http: httpx.Client) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "def area("}]}]
    assert text_of(send(http, messages=blocks)) == text_of(send(http))


def test_stop_sequences(http: httpx.Client) -> None:
    full = text_of(send(http, max_tokens=48))
    stop = full[len(full) // 2 :][:3]
    if not stop.strip():
        pytest.skip("the text is too short to cut")
    body = send(http, max_tokens=48, stop_sequences=[stop])
    assert text_of(body) == full[: full.index(stop)]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)


def test_tokens_are_counted(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    counted = claude.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": "def area("}]
    )
    assert counted.input_tokens == send(http)["usage"]["input_tokens"] > 1


def test_events_come_in_order(http: httpx.Client) -> None:
    events = stream(http, PATH, ASK)
    bodies: list[JSON] = []
    for event in events:
        assert event.data != "[DONE]", "this route ends with message_stop"
        body: JSON = json.loads(event.data)
        assert event.name == body["type"]
        if body["type"] != "ping":
            bodies.append(body)
    kinds = [b["type"] for b in bodies]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert len(kinds) > 8
    start = bodies[0]["message"]
    whole = send(http)
    assert set(start) >= REQUIRED, "a whole message"
    assert start["role"] == "assistant"
    assert start["content"] == []
    assert start["model"] == MODEL
    assert (start["stop_reason"], start["stop_sequence"]) == (None, None)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert "".join(
        b["delta"]["text"] for b in bodies if b["type"] == "content_block_delta"
    ) == text_of(whole)
    assert {b["index"] for b in bodies if "index" in b} == {0}
    assert bodies[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert bodies[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_client_streams(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hi"}]
    ) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == "".join(b.text for b in final.content if b.type == "text")
    assert final.stop_reason in {"end_turn", "max_tokens"}


def test_a_forced_tool_is_used(http: httpx.Client) -> None:
    tool = {
        "name": "clock",
        "description": "The time.",
        "input_schema": {
            "type": "object",
            "properties": {"zone": {"enum": ["utc", "cet"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    }
    body = send(http, max_tokens=120, tools=[tool], tool_choice={"type": "tool", "name": "clock"})
    uses = [b for b in body["content"] if b["type"] == "tool_use"]
    assert [(u["name"], u["input"]["zone"] in {"utc", "cet"}) for u in uses] == [("clock", True)]
    assert uses[0]["id"]
    assert body["stop_reason"] == "tool_use"


IMAGE: JSON = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
}
WRONG: dict[str, JSON] = {
    "no-messages": {"messages": []},
    "messages-null": {"messages": None},
    "unknown-role": {"messages": [{"role": "nobody", "content": "x"}]},
    "no-content": {"messages": [{"role": "user"}]},
    "block-of-unknown-type": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "image-for-a-text-model": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "max-tokens-missing": {"max_tokens": None},
    "max-tokens-zero": {"max_tokens": 0},
    "max-tokens-negative": {"max_tokens": -1},
    "max-tokens-huge": {"max_tokens": 10**30},
    "temperature-three": {"temperature": 3},
    "temperature-a-word": {"temperature": "hot"},
    "top-p-two": {"top_p": 2},
    "tools-a-string": {"tools": "f"},
    "absent-tool": {
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "g"},
    },
    "stop-a-number": {"stop_sequences": [5]},
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_errors_have_anthropics_envelope(http: httpx.Client, name: str, streaming: bool) -> None:
    response = http.post(PATH, json={**ASK, **WRONG[name], "stream": streaming})
    assert_anthropic_error(response, 400, "invalid_request_error")


def test_an_over_long_prompt(http: httpx.Client, context_length: int) -> None:
    messages = [{"role": "user", "content": "word " * context_length * 2}]
    response = http.post(PATH, json={**ASK, "messages": messages})
    assert_anthropic_error(response, 400, "invalid_request_error")


def test_an_unknown_model(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(
            model="nope", max_tokens=8, messages=[{"role": "user", "content": "hi"}]
        )
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
