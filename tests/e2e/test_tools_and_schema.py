"""Tool calls and constrained output: what comes back obeys the schema that went in."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel

from . import shapes
from .bodies import greedy
from .gateway import MODEL
from .wire import JSON, post_chunks, text_of

PATH = "/v1/chat/completions"
# Bounded on every side, so that an untrained model too comes to an end.
FORECAST: JSON = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["rome", "oslo", "lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK: JSON = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, JSON] = {"forecast": FORECAST, "clock": CLOCK}
TOOLS: list[JSON] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"The {name}.", "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]
ASK: JSON = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Will it rain in Rome?"}],
    "temperature": 0,
    "max_tokens": 160,
}
NAMED: JSON = {"type": "function", "function": {"name": "forecast"}}
COLOURS = ["red", "green", "blue"]


def chat(http: httpx.Client, **changes: Any) -> JSON:
    response = http.post(PATH, json={**ASK, **changes})
    assert response.status_code == 200, response.text
    body: JSON = response.json()
    shapes.chat(body)
    return body


def schema_format(schema: JSON) -> JSON:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


def assert_calls_obey(calls: list[JSON]) -> None:
    assert calls
    assert len({c["id"] for c in calls}) == len(calls)
    assert all(c["id"] for c in calls)
    for call in calls:
        assert call["type"] == "function"
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]]
        )


def streamed(pieces: list[JSON]) -> JSON:
    """The choice that OpenAI's client puts together from the chunks."""
    state = ChatCompletionStreamState()
    for piece in pieces:
        state.handle_chunk(shapes.chunk(piece))
    whole = state.current_completion_snapshot.model_dump(mode="json")
    choice: JSON = whole["choices"][0]
    return choice


def meaning(call: JSON) -> tuple[str, JSON]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


STRICT: list[JSON] = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS]
EITHER = pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["free", "strict"])


@EITHER
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_named_tool_is_called(http: httpx.Client, temperature: float, tools: list[JSON]) -> None:
    body = chat(http, tools=tools, tool_choice=NAMED, temperature=temperature)
    choice = body["choices"][0]
    assert_calls_obey(choice["message"]["tool_calls"])
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["forecast"]
    assert choice["finish_reason"] in {"stop", "tool_calls"}
    assert not choice["message"]["content"]


@EITHER
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_required_tool_is_called(
    http: httpx.Client, temperature: float, tools: list[JSON]
) -> None:
    body = chat(
        http,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
    )
    choice = body["choices"][0]
    assert_calls_obey(choice["message"]["tool_calls"])
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def test_auto_is_the_default_with_tools(http: httpx.Client) -> None:
    implied = chat(http, tools=TOOLS, max_tokens=24)["choices"][0]["message"]
    said = chat(http, tools=TOOLS, tool_choice="auto", max_tokens=24)["choices"][0]["message"]
    assert implied["content"] == said["content"]


def test_none_calls_nothing(http: httpx.Client) -> None:
    message = chat(http, tools=TOOLS, tool_choice="none", max_tokens=24)["choices"][0]["message"]
    assert "tool_calls" not in message
    assert isinstance(message["content"], str)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_streamed_calls_equal_the_whole(http: httpx.Client, choice: object) -> None:
    request: JSON = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    reference = chat(http, **request)["choices"][0]["message"]["tool_calls"]
    found = streamed(post_chunks(http, PATH, {**ASK, **request}))
    calls = found["message"]["tool_calls"]
    assert_calls_obey(calls)
    # White space in the arguments may differ: for the whole they are written anew.
    assert [meaning(c) for c in calls] == [meaning(c) for c in reference]
    ends = {"tool_calls"} if choice == "required" else {"stop", "tool_calls"}
    assert found["finish_reason"] in ends


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_streaming_with_tools_that_stay_unused(http: httpx.Client, choice: str) -> None:
    request: JSON = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 24}
    found = streamed(post_chunks(http, PATH, {**ASK, **request}))
    message = chat(http, **request)["choices"][0]["message"]
    assert (found["message"]["content"] or "") == (message["content"] or "")


def test_a_whole_tool_conversation(http: httpx.Client) -> None:
    call = chat(http, tools=TOOLS, tool_choice=NAMED)["choices"][0]["message"]
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": call["tool_calls"]},
        {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "rain"},
    ]
    assert (
        chat(http, messages=messages, tools=TOOLS, max_tokens=8)["usage"]["completion_tokens"] >= 1
    )


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_json_schema_is_obeyed(http: httpx.Client, temperature: float) -> None:
    body = chat(http, response_format=schema_format(FORECAST), temperature=temperature, n=3)
    for choice in body["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), FORECAST)


def test_nested_schema_is_obeyed(http: httpx.Client) -> None:
    schema: JSON = {
        "type": "object",
        "properties": {
            "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
            "inner": FORECAST,
            "maybe": {"anyOf": [{"type": "null"}, {"enum": ["a", "b"]}]},
            "tag": {"type": "string", "maxLength": 5},
        },
        "required": ["flags", "inner", "maybe", "tag"],
        "additionalProperties": False,
    }
    body = chat(http, response_format=schema_format(schema), temperature=1.0)
    jsonschema.validate(json.loads(text_of(body)), schema)


def test_streamed_schema_is_obeyed(http: httpx.Client) -> None:
    constrained: JSON = {"response_format": schema_format(FORECAST)}
    text = streamed(post_chunks(http, PATH, {**ASK, **constrained}))["message"]["content"]
    jsonschema.validate(json.loads(text), FORECAST)
    assert text == text_of(chat(http, **constrained))


def test_json_object_is_json(http: httpx.Client) -> None:
    """A poor model may never close its object: then the text must at least be the start of one."""
    for seed in range(3):
        choice = chat(
            http, response_format={"type": "json_object"}, temperature=1.0, seed=seed, max_tokens=96
        )["choices"][0]
        text = choice["message"]["content"]
        assert re.match(r"\s*\{\s*(\"|\}|$)", text), text
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def test_the_client_parses_into_a_type(client: openai.OpenAI) -> None:
    class Forecast(BaseModel):
        city: Literal["rome", "oslo"]
        sunny: bool

    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Will it rain?"}],
        response_format=Forecast,
        max_tokens=120,
    )
    assert isinstance(answer.choices[0].message.parsed, Forecast)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": COLOURS}, "|".join(COLOURS)),
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"grammar": 'root ::= "x" ("y" | "z") "!"'}, "x(y|z)!"),
    ],
    ids=["choice", "regex", "grammar"],
)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_other_constraints_hold(
    http: httpx.Client, constraint: JSON, pattern: str, temperature: float
) -> None:
    body = chat(http, structured_outputs=constraint, temperature=temperature, n=2)
    for choice in body["choices"]:
        assert re.fullmatch(pattern, choice["message"]["content"]), choice


def test_a_constraint_holds_for_every_prompt_of_a_batch(http: httpx.Client) -> None:
    body = greedy(["a"] * 4, 40, structured_outputs={"choice": COLOURS}, ignore_eos=False)
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert {choice["text"] for choice in choices} <= set(COLOURS)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_tool_without_parameters_is_called_without_any(http: httpx.Client, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    asked: JSON = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    message = chat(http, **asked, temperature=1.0)["choices"][0]["message"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{}]


def test_a_schema_without_types_is_obeyed(http: httpx.Client) -> None:
    """Keywords that the grammar backend ignores where no `type` stands beside them."""
    schema: JSON = {
        "properties": {"n": {"minimum": 3, "maximum": 9}, "word": {"maxLength": 4}},
        "required": ["n", "word"],
        "additionalProperties": False,
    }
    answer = json.loads(text_of(chat(http, response_format=schema_format(schema), temperature=1.0)))
    jsonschema.validate(answer, schema)
    assert 3 <= answer["n"] <= 9
