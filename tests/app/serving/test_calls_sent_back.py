"""Whatever a model calls a tool with is handed out, and is taken back; so are listed items."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.serving.test_dialects import PATHS, STREAMING, TOOLS, USER, VALID, Gateway, send

JSON = dict[str, Any]
LIMITS = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
HALF = '{"n": "\\ud83d"}'
DEEP = '{"n": ' + "[" * 300 + "]" * 300 + "}"


def called_with(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def turn_of(client: TestClient, dialect: str, streaming: bool, tools: list[JSON]) -> list[JSON]:
    """The model's turn, as a client of the dialect keeps it."""
    response = send(client, dialect, streaming, tools=tools, **{LIMITS[dialect]: 800})
    assert response.status_code == 200, response.text
    if not streaming:
        answer = response.json()
        if dialect == "chat":
            return [answer["choices"][0]["message"]]
        if dialect == "responses":
            return list(answer["output"])
        return [{"role": "assistant", "content": answer["content"]}]
    lines = response.text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert not any("error" in event for event in events)
    if dialect == "responses":
        return list(events[-1]["response"]["output"])
    if dialect == "chat":
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = "".join(part["function"]["arguments"] for part in parts)
        function = {"name": "f", "arguments": arguments}
        call = {"id": parts[0]["id"], "type": "function", "function": function}
        return [{"role": "assistant", "tool_calls": [call]}]
    parts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    value = json.loads("".join(part["partial_json"] for part in parts))
    block = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": value}
    return [{"role": "assistant", "content": [block]}]


def send_back(client: TestClient, dialect: str, turn: list[JSON], tools: list[JSON]) -> Any:
    field = "input" if dialect == "responses" else "messages"
    body: JSON = {field: [USER, *turn, {"role": "user", "content": "and more?"}]}
    # As JavaScript writes it: half of a pair as an escape.
    content = json.dumps({**VALID[dialect], **body, "tools": tools})
    headers = {"content-type": "application/json"}
    return client.post(PATHS[dialect], content=content, headers=headers)


@STREAMING
@pytest.mark.parametrize("dialect", sorted(TOOLS))
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(HALF, id="half a surrogate pair"),
        pytest.param('{"n": "[\\\\w\\ud800-\\uDFFF]"}', id="an expression of surrogates"),
        pytest.param('{"n": 1000000000000000000000}', id="an integer of 70 bits"),
    ],
)
def test_a_call_is_taken_back(
    gateway: Gateway, dialect: str, arguments: str, streaming: bool
) -> None:
    client = gateway(tool_call_parser="hermes", answer=called_with(arguments))
    turn = turn_of(client, dialect, streaming, TOOLS[dialect])
    response = send_back(client, dialect, turn, TOOLS[dialect])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("dialect", sorted(TOOLS))
def test_a_call_that_nests_deeply_is_taken_back(gateway: Gateway, dialect: str) -> None:
    client = gateway(tool_call_parser="hermes", answer=called_with(DEEP))
    turn = turn_of(client, dialect, False, TOOLS[dialect])
    response = send_back(client, dialect, turn, TOOLS[dialect])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(HALF, id="half a surrogate pair"),
        pytest.param('{"n": 1, "dry_run": True}', id="Python"),
        pytest.param("[1]", id="a list"),
    ],
)
def test_messages_hand_out_the_text_of_what_is_no_usable_object(
    gateway: Gateway, arguments: str
) -> None:
    """An agent would run the call with what is left of it."""
    client = gateway(tool_call_parser="hermes", answer=called_with(arguments))
    (message,) = turn_of(client, "messages", False, TOOLS["messages"])
    (shown,) = message["content"][0]["input"].items()
    assert shown[0] == "raw_arguments"
    assert shown[1].startswith(arguments)


@STREAMING
def test_a_custom_tools_call_is_taken_back(gateway: Gateway, streaming: bool) -> None:
    answer = called_with('{"input": "duck \\ud83e\\udd86, half \\ud83d one"}')
    client = gateway(tool_call_parser="hermes", answer=answer)
    tools = [{"type": "custom", "name": "f", "description": "d"}]
    turn = turn_of(client, "responses", streaming, tools)
    assert turn[0]["input"] == "duck 🦆, half \ufffd one"
    response = send_back(client, "responses", turn, tools)
    assert response.status_code == 200, response.text


def test_the_items_of_a_response_are_taken_back(gateway: Gateway) -> None:
    """Each was given an id, which not every type of item has in vLLM's request model."""
    client, path = gateway(tool_call_parser="hermes", answer="Hello."), PATHS["responses"]
    items = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"type": "message", "role": "assistant", "content": "I call f."},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    body: JSON = {**VALID["responses"], "tools": TOOLS["responses"], "input": items}
    made = client.post(path, json=body).json()
    listed = client.get(f"{path}/{made['id']}/input_items?order=asc").json()["data"]
    assert [item["id"][:6] for item in listed] == [f"item_{n}" for n in range(len(items))]
    again = client.post(path, json={**body, "input": listed})
    assert again.status_code == 200, again.text
