"""POST /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.responses import Response

from .gateway import MODEL
from .wire import JSON, Event, assert_error, assert_names, stream

PATH = "/v1/responses"
ASK: JSON = {
    "model": MODEL,
    "input": "def area(",
    "temperature": 0,
    "max_output_tokens": 24,
    "ignore_eos": True,
}


def respond(http: httpx.Client, **changes: Any) -> JSON:
    response = http.post(PATH, json={**ASK, **changes})
    assert response.status_code == 200, response.text
    body: JSON = response.json()
    Response.model_validate(body)
    return body


def output_text(body: JSON) -> str:
    parts = [p for item in body["output"] if item["type"] == "message" for p in item["content"]]
    return "".join(p["text"] for p in parts if p["type"] == "output_text")


def parsed(events: list[Event]) -> list[JSON]:
    """Named events whose name is their data's type."""
    found: list[JSON] = []
    for event in events:
        assert event.data != "[DONE]", "this route ends with its last event"
        body: JSON = json.loads(event.data)
        assert event.name == body["type"]
        found.append(body)
    return found


def test_a_cut_response_says_so(http: httpx.Client) -> None:
    body = respond(http)
    assert (body["object"], body["model"]) == ("response", MODEL)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["type"] == "message"
    assert body["output"][0]["role"] == "assistant"
    assert body["usage"]["output_tokens"] == 24
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 24
    assert body["usage"]["input_tokens_details"]["cached_tokens"] >= 0
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_the_same_model_answers_here_and_in_chat(http: httpx.Client) -> None:
    chat = http.post(
        "/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": [{"role": "user", "content": ASK["input"]}],
            "temperature": 0,
            "max_tokens": 24,
            "ignore_eos": True,
        },
    ).json()
    assert output_text(respond(http)) == chat["choices"][0]["message"]["content"]


def test_instructions_reach_the_model(http: httpx.Client) -> None:
    more = respond(http, instructions="Answer with one word, in capitals, without a stop.")
    assert more["usage"]["input_tokens"] > respond(http)["usage"]["input_tokens"]
    assert more["instructions"] == "Answer with one word, in capitals, without a stop."


def test_a_list_of_messages_is_input_too(http: httpx.Client) -> None:
    text = ASK["input"]
    plain = {"role": "user", "content": text}
    parts = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    texts = {output_text(respond(http, input=given)) for given in (text, [plain], [parts])}
    assert len(texts) == 1


def test_events_come_in_order(http: httpx.Client) -> None:
    events = parsed(stream(http, PATH, ASK))
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[-1] == "incomplete", "it was cut"
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert len(kinds) > 11
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    done = next(e for e in events if e["type"] == "response.output_text.done")
    final = events[-1]["response"]
    assert text == done["text"] == output_text(final) == output_text(respond(http))
    assert (final["status"], final["usage"]["output_tokens"]) == ("incomplete", 24)
    assert len({e["item_id"] for e in events if "item_id" in e}) == 1
    assert events[0]["response"]["id"] == final["id"]
    assert events[0]["response"]["status"] == "in_progress"


def test_the_client_streams(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi", max_output_tokens=16) as stream:
        first, *_, last = list(stream)
    assert first.type == "response.created"
    # The helper's own final response exists only for an answer that was not cut.
    assert last.type in {"response.completed", "response.incomplete"}
    assert last.response.usage is not None
    assert 1 <= last.response.usage.output_tokens <= 16


def test_a_schema_is_obeyed(http: httpx.Client) -> None:
    schema: JSON = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
        "required": ["mood", "sure"],
        "additionalProperties": False,
    }
    text_format = {"type": "json_schema", "name": "mood", "schema": schema, "strict": True}
    constrained = {"max_output_tokens": 120, "ignore_eos": False}
    body = respond(http, **constrained, text={"format": text_format})
    assert body["status"] == "completed"
    jsonschema.validate(json.loads(output_text(body)), schema)


def test_a_forced_function_is_called(http: httpx.Client) -> None:
    parameters: JSON = {
        "type": "object",
        "properties": {"zone": {"enum": ["utc", "cet"]}},
        "required": ["zone"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "clock", "parameters": parameters, "strict": True}
    named = {"type": "function", "name": "clock"}
    constrained = {"max_output_tokens": 120, "ignore_eos": False}
    body = respond(http, **constrained, tools=[tool], tool_choice=named)
    (call,) = [item for item in body["output"] if item["type"] == "function_call"]
    assert call["name"] == "clock"
    assert call["call_id"]
    jsonschema.validate(json.loads(call["arguments"]), parameters)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"instructions": 5}, "instructions"),
        ({"text": {"format": {"type": "yaml"}}}, "text"),
        ({"include": ["nothing"]}, "include"),
    ],
    ids=str,
)
def test_errors_name_the_field(
    http: httpx.Client, changes: JSON, field: str, streaming: bool
) -> None:
    assert_names(
        assert_error(http.post(PATH, json={**ASK, **changes, "stream": streaming}), 400), field
    )
