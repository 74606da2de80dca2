"""A null field of a request is a field that is not given, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, get_type_hints

from anthropic.types import message_create_params as anthropic_create
from anthropic.types import text_block_param, tool_param, tool_result_block_param
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import (
    chat_completion_assistant_message_param,
    chat_completion_content_part_image_param,
    chat_completion_content_part_text_param,
    chat_completion_function_tool_param,
    completion_create_params,
)
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import easy_input_message_param, response_create_params

from app.declaration.null_fields import drop_null_fields

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, None], "default": None}}}
TEXT = {"type": "text", "text": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"n": null}'}}
# One full request of each dialect.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "fake",
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": "yes", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "response_format": {"type": "text"},
    },
    "/v1/completions": {"model": "fake", "prompt": "hi", "max_tokens": 2},
    "/v1/responses": {
        "model": "fake",
        "max_output_tokens": 16,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 2,
        "system": [TEXT],
        "messages": [
            {"role": "user", "content": [TEXT]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"n": None}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}],
            },
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
    },
}
# What OpenAI's and Anthropic's clients may put into the objects of a request.
NAMES = {
    name
    for shape in (
        CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsBase,
        chat_completion_assistant_message_param.ChatCompletionAssistantMessageParam,
        chat_completion_content_part_text_param.ChatCompletionContentPartTextParam,
        chat_completion_content_part_image_param.ChatCompletionContentPartImageParam,
        chat_completion_function_tool_param.ChatCompletionFunctionToolParam,
        response_create_params.ResponseCreateParamsBase,
        easy_input_message_param.EasyInputMessageParam,
        anthropic_create.MessageCreateParamsBase,
        text_block_param.TextBlockParam,
        tool_param.ToolParam,
        tool_result_block_param.ToolResultBlockParam,
    )
    for name in get_type_hints(shape)
}
OPAQUE = ("parameters", "input_schema", "input", "schema")


def objects(value: Any, top: bool = True) -> Iterator[dict[str, Any]]:
    """Every object of a request that is not the client's own JSON."""
    if isinstance(value, dict):
        yield value
        for name, item in value.items():
            if name not in OPAQUE or (top and name == "input"):
                yield from objects(item, False)
    elif isinstance(value, list):
        for item in value:
            yield from objects(item, False)


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and its request with nulls put where nothing was."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body = deepcopy(BODIES[path])
    for place in list(objects(body)):
        for name in draw(st.sets(st.sampled_from(sorted(NAMES | {"no_such_field"})), max_size=3)):
            place.setdefault(name, None)
    return path, body


@given(spoilt())
@settings(max_examples=200)
def test_null_fields_are_dropped_and_nothing_else(case: tuple[str, dict[str, Any]]) -> None:
    path, body = case
    drop_null_fields(body)
    assert body == BODIES[path]


def test_nulls_of_the_clients_own_json_and_of_lists_stay() -> None:
    body = {
        "messages": [None],
        "tools": [{"input_schema": {"default": None}, "strict": None}],
        "response_format": {"type": "structural_tag", "format": {"json_schema": {"x": None}}},
        "chat_template_kwargs": {"a": None},
    }
    wanted = deepcopy(body)
    del wanted["tools"][0]["strict"]
    drop_null_fields(body)
    assert body == wanted


def test_deep_nesting_is_no_recursion() -> None:
    body: dict[str, Any] = {"a": None}
    for _ in range(5000):
        body = {"a": [body]}
    drop_null_fields(body)
    while body:
        body = body["a"][0]


@given(spoilt())
@settings(max_examples=25)
def test_nulls_change_no_answer(
    gateway: Callable[..., TestClient], case: tuple[str, dict[str, Any]]
) -> None:
    path, body = case
    client = gateway(tool_call_parser="hermes")
    given = client.post(path, json=body)
    assert given.status_code == 200, given.text
    assert given.json()["usage"] == client.post(path, json=BODIES[path]).json()["usage"]


def test_a_part_with_a_null_for_another_kind_is_text(gateway: Callable[..., TestClient]) -> None:
    content = [{"type": "text", "text": "hi", "image_url": None}]
    body = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    assert gateway().post("/v1/chat/completions", json=body).is_success
