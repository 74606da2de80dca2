"""Earlier turns, sent back in every form that clients use, reach the prompt whole."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import ApiError
from app.validation import replay
from tests.app.scripted_engine import Client
from tests.app.serving.streamed_answers import chat_body, messages_body, responses_body
from tests.app.serving.test_whole_and_streamed import CALL, SCRIPTS, TERSE

JSON = dict[str, Any]
HELLO: JSON = {"role": "user", "content": "hi"}
MORE: JSON = {"role": "user", "content": "and more?"}
DOCUMENT: JSON = {
    "type": "document",
    "title": "Rain",
    "source": {"type": "text", "media_type": "text/plain", "data": "http://w says it rains"},
}


@pytest.fixture(scope="module")
def client() -> Client:
    return Client(tool_call_parser="hermes")


def prompt(client: Client, operation: str, **body: Any) -> str:
    """The prompt that a body is rendered to."""
    limit = "max_output_tokens" if operation == "responses" else "max_tokens"
    client.engine.script = "ok"
    asyncio.run(client.answer(operation, {limit: 2, **body}))
    return client.engine.prompts[-1]


@pytest.mark.parametrize(
    ("item", "texts"),
    [
        ({"content": [{"type": "refusal", "refusal": "not this"}]}, ["not this"]),
        ({"content": []}, []),
        ({"content": ""}, []),
        ({"content": "plain"}, ["plain"]),
        (
            {"content": [{"type": "output_text", "text": t, "annotations": []} for t in "αβ"]},
            ["αβ"],
        ),
        (
            {
                "content": [
                    {"type": "output_text", "text": "one"},
                    {"type": "refusal", "refusal": "two"},
                ]
            },
            ["one", "two"],
        ),
        ({"content": [{"type": "input_text", "text": "misnamed"}]}, ["misnamed"]),
    ],
)
@pytest.mark.parametrize("typed", [{}, {"type": "message", "id": "msg_1", "status": "completed"}])
def test_an_output_message_comes_back(
    client: Client, item: JSON, texts: list[str], typed: JSON
) -> None:
    items = [HELLO, {**typed, "role": "assistant", **item}, MORE]
    rendered = prompt(client, "responses", input=items)
    assert [text for text in [*texts, "and more?"] if text not in rendered] == []
    assert rendered.count("<|im_start|>assistant") == 2


def test_reasoning_comes_back(client: Client) -> None:
    def item(**fields: Any) -> JSON:
        return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}

    parts = [{"type": "reasoning_text", "text": text} for text in ("first ", "second")]
    summary = [{"type": "summary_text", "text": "in short"}]
    (kept,) = replay.response_items([item(content=parts)])
    assert [part["text"] for part in kept["content"]] == ["first second"]
    (kept,) = replay.response_items([item(summary=summary)])
    assert [part["text"] for part in kept["content"]] == ["in short"]
    assert replay.response_items([item(), item(content=None, encrypted_content=None)]) == []
    answer = {"role": "assistant", "content": "so"}
    assert "so" in prompt(client, "responses", input=[HELLO, item(content=parts), answer, MORE])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("plain", "plain"),
        ([], ""),
        ([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": "a"}], "a"),
    ],
)
def test_a_tools_output_comes_back(client: Client, output: Any, expected: str) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": output}
    rendered = prompt(client, "responses", input=[HELLO, call, result])
    assert '{"name": "f", "arguments": {"x": 1}}' in rendered
    assert f"<tool_response>\n{expected}\n</tool_response>" in rendered


@pytest.mark.parametrize("arguments", ['{"city": "Bad', "[1]", "42", "not json", '"text"'])
def test_arguments_that_are_no_object_are_shown(client: Client, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "?"}
    turns = [HELLO, {"role": "assistant", "tool_calls": [call]}, result]
    shown = json.dumps({"raw_arguments": arguments})
    assert shown in prompt(client, "chat", messages=turns)
    item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    assert shown in prompt(client, "responses", input=[HELLO, item, MORE])
    assert replay.chat_messages(turns, any_arguments=True) == turns
    assert replay.response_items([item], any_arguments=True) == [item]


def test_legacy_function_calls_come_back(client: Client) -> None:
    turns = [
        HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "sunny"},
    ]
    rendered = prompt(client, "chat", messages=turns)
    assert '{"name": "f", "arguments": {}}' in rendered
    assert "<tool_response>\nsunny\n</tool_response>" in rendered
    call, result = replay.chat_messages(turns)[1:]
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    "content", [None, "", "as far as", [{"type": "text", "text": "as far as"}]]
)
def test_a_refusal_in_chat_comes_back(client: Client, content: Any) -> None:
    turn = {"role": "assistant", "content": content, "refusal": "I will not"}
    rendered = prompt(client, "chat", messages=[HELLO, turn, MORE])
    assert "I will not" in rendered
    assert ("as far as" in rendered) == bool(content)


def test_an_assistants_turn_at_the_end_is_continued(client: Client) -> None:
    for content in ("The answer is", [{"type": "text", "text": t} for t in ("The answer", " is")]):
        turns = [HELLO, {"role": "assistant", "content": content}]
        rendered = prompt(client, "messages", messages=turns)
        assert rendered.endswith("<|im_start|>assistant\nThe answer is")
    empty = prompt(client, "messages", messages=[HELLO, {"role": "assistant", "content": ""}])
    assert empty == prompt(client, "messages", messages=[HELLO])


def test_an_unfinished_output_message_at_the_end_is_continued(client: Client) -> None:
    last: JSON = {"type": "message", "id": "msg_1", "role": "assistant", "status": "incomplete"}
    last["content"] = [{"type": "output_text", "text": "The answer is", "annotations": []}]
    rendered = prompt(client, "responses", input=[HELLO, last])
    assert rendered.endswith("<|im_start|>assistant\nThe answer is")


@pytest.mark.parametrize("status", ["in_progress", "incomplete", "completed"])
def test_a_users_message_is_answered_whatever_its_status(client: Client, status: str) -> None:
    """Catches: a prompt that ends within the user's turn, which the model then goes on with."""
    said = {**HELLO, "type": "message", "status": status}
    assert prompt(client, "responses", input=[said]) == prompt(client, "responses", input=[HELLO])


@pytest.mark.parametrize(
    ("result", "texts"),
    [
        ({"content": "sunny"}, ["sunny"]),
        ({}, []),
        ({"content": [{"type": "text", "text": t} for t in ("sun", "rain")]}, ["sun\nrain"]),
        ({"content": "no such city", "is_error": True}, ["Error: no such city"]),
        ({"content": [{"type": "text", "text": "gone"}], "is_error": True}, ["Error:\ngone"]),
        (
            {
                "content": [
                    {
                        "type": "search_result",
                        "title": "Weather",
                        "source": "http://w",
                        "content": [{"type": "text", "text": "sunny"}],
                    }
                ]
            },
            ["Weather\nhttp://w\nsunny"],
        ),
        ({"content": [DOCUMENT]}, ["Rain\nhttp://w says it rains"]),
    ],
)
def test_anthropic_tool_results_come_back(client: Client, result: JSON, texts: list[str]) -> None:
    turns = [
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Ur"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", **result}]},
    ]
    rendered = prompt(client, "messages", messages=turns)
    assert [text for text in [*texts, "Let me see.", '"city": "Ur"'] if text not in rendered] == []


def test_anthropic_documents_of_text_reach_the_prompt(client: Client) -> None:
    parts = [{"type": "text", "text": text} for text in ("sun", "wind")]
    other = {"type": "document", "context": "old", "source": {"type": "content", "content": parts}}
    turn = {"role": "user", "content": [DOCUMENT, other]}
    rendered = prompt(client, "messages", messages=[turn])
    assert "Rain\nhttp://w says it rains" in rendered
    assert "old\nsun\nwind" in rendered


@pytest.mark.parametrize(
    ("operation", "body", "param"),
    [
        ("responses", {"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ("responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ("responses", {"input": [{"id": "msg_1"}]}, "input[0].id"),
        ("responses", {"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        (
            "responses",
            {"input": [HELLO, {"role": "assistant", "content": [{"type": "song"}]}]},
            "input[1].content[0].type",
        ),
        (
            "responses",
            {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}]},
            "input[0].content[0].refusal",
        ),
        (
            "responses",
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content",
        ),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]},
            "input[0].output",
        ),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{}, {}]}]},
            "input[0].output[0].type",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": 5}}]},
            "messages[0].function_call.name",
        ),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "redacted_thinking"}]}]},
            "messages[0].content[0].type",
        ),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {**DOCUMENT, "source": {"type": "url", "url": "http://w/a.pdf"}}
                        ],
                    }
                ]
            },
            "messages[0].content[0].source.type",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(
    client: Client, operation: str, body: JSON, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        prompt(client, operation, **body)
    assert (caught.value.status, caught.value.param) == (400, param)


def turns_of(operation: str, answer: JSON) -> tuple[str, list[JSON]]:
    """Text of an answer, and its calls as chat completions write them."""
    if operation == "chat":
        message = answer["choices"][0]["message"]
        return message.get("content") or "", message.get("tool_calls") or []
    if operation == "responses":
        items = answer["output"]
        parts = [part for item in items for part in item.get("content") or ()]
        calls = [(i["call_id"], i["name"], i["arguments"]) for i in items if "arguments" in i]
        text = "".join(part["text"] for part in parts)
    else:
        blocks = answer["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [
            (block["id"], block["name"], json.dumps(block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        ]
    return text, [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in calls
    ]


def sent_back(operation: str, answer: JSON) -> list[JSON]:
    """What a client of the same dialect appends to its request."""
    if operation == "chat":
        return [answer["choices"][0]["message"]]
    if operation == "responses":
        items: list[JSON] = answer["output"]
        return items
    return [{"role": "assistant", "content": answer["content"]}]


def translated(operation: str, text: str, calls: list[JSON]) -> list[JSON]:
    """The turn in another dialect, as proxies translate it."""
    if operation == "chat":
        return [{"role": "assistant", "content": text or None, "tool_calls": calls or None}]
    if operation == "responses":
        content = [{"type": "output_text", "text": text}]
        items: list[JSON] = [{"role": "assistant", "content": content}] if text else []
        return items + [
            {"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls
        ]
    blocks: list[JSON] = [{"type": "text", "text": text}] if text else []
    for call in calls:
        arguments = call["function"]["arguments"]
        value = json.loads(replay.object_arguments(arguments))
        name = call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": value})
    return [{"role": "assistant", "content": blocks}]


BODIES = {"chat": chat_body, "responses": responses_body, "messages": messages_body}


@given(script=SCRIPTS, limit=st.integers(1, 64), operation=st.sampled_from(sorted(BODIES)))
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_an_answer_sent_back_is_in_the_prompt(
    client: Client, script: str, limit: int, operation: str
) -> None:
    client.engine.script, client.engine.steps = script, (4,)
    answer = asyncio.run(client.answer(operation, BODIES[operation](limit, True)))
    text, calls = turns_of(operation, answer)
    for route in BODIES:
        turn = (
            sent_back(operation, answer) if route == operation else translated(route, text, calls)
        )
        if route != operation and not text and not calls:
            continue
        field = "input" if route == "responses" else "messages"
        rendered = prompt(client, route, **{field: [HELLO, *turn, MORE]})
        assert text in rendered
        assert "and more?" in rendered
        for call in calls:
            arguments = call["function"]["arguments"]
            shown = json.loads(replay.object_arguments(arguments))
            assert json.dumps(shown, ensure_ascii=False) in rendered


def test_complete_and_cut_calls_come_back_together(client: Client) -> None:
    client.engine.script, client.engine.steps = CALL + TERSE, (1,)
    length = len(client.engine.tokens())
    answer = asyncio.run(client.answer("chat", chat_body(length - 12, True)))
    message = answer["choices"][0]["message"]
    assert len(message["tool_calls"]) == 2
    rendered = prompt(client, "chat", messages=[HELLO, message, MORE])
    assert '"arguments": {"city": "Bad Aibling"}' in rendered
    assert '"raw_arguments": ' in rendered
