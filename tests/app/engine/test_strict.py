"""Refusals that vLLM's own models do not make, with the field that OpenAI would name."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine import strict
from app.engine.protocol import ChatRequest, TextRequest
from app.errors import ApiError

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([USER, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "assistant"}], "messages[0].content"),
    ],
)
def test_bad_messages_name_their_place(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        strict.check_messages(messages)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_legal_messages_pass() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    strict.check_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ]
    )


@pytest.mark.parametrize("value", ["5", True, 5.5, [5], {"a": 5}])
def test_a_number_must_be_a_number(value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        strict.check_scalars({"max_tokens": value}, ChatRequest)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty"])
@pytest.mark.parametrize("value", ["0.5", True, [0.5]])
def test_a_float_must_be_a_number(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        strict.check_scalars({field: value}, TextRequest)
    assert caught.value.param == field


def test_numbers_nulls_and_whole_floats_pass() -> None:
    strict.check_scalars(
        {"temperature": 1, "max_tokens": None, "n": 2, "stream": True}, ChatRequest
    )


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(ApiError, match="tempurature") as caught:
        strict.check_fields({"tempurature": 1}, ChatRequest, "chat")
    assert caught.value.param == "tempurature"


def test_fields_without_effect_are_dropped_and_checked() -> None:
    payload = {"store": True, "metadata": {"a": "b"}, "temperature": 1}
    strict.check_fields(payload, ChatRequest, "chat")
    assert payload == {"temperature": 1}
    with pytest.raises(ApiError) as caught:
        strict.check_fields({"metadata": 5}, ChatRequest, "chat")
    assert caught.value.param == "metadata"


@pytest.mark.parametrize(
    ("field", "harmless", "refused"),
    [("best_of", 1, 2), ("suffix", "", "end"), ("priority", 0, 5), ("request_id", None, "mine")],
)
def test_what_cannot_be_honoured_is_refused_not_ignored(
    field: str, harmless: Any, refused: Any
) -> None:
    strict.check_fields({field: harmless}, TextRequest, "completions")
    with pytest.raises(ApiError) as caught:
        strict.check_fields({field: refused}, TextRequest, "completions")
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 2000}, "stop"),
    ],
)
def test_bounds(payload: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        strict.check_generation(payload)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ("f", "tools[0].type"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function"),
        (
            {"type": "function", "function": {"name": "f", "parameters": 5}},
            "tools[0].function.parameters",
        ),
    ],
)
def test_tools_must_name_a_function(tool: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        strict.check_tools({"tools": [tool]})
    assert caught.value.param == param


def test_many_greedy_choices_are_allowed() -> None:
    request = ChatRequest.model_validate({"messages": [USER], "n": 3, "temperature": 0})
    params = request.to_sampling_params(16, {})
    assert (params.n, params.temperature, request.n) == (3, 0.0, 3)
