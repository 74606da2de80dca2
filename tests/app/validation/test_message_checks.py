"""Messages, parts and tools that vLLM would let through or trip over."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import ApiError
from app.validation import message_checks

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


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
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([{**USER, "tool_calls": -1e308}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "call"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": {"0": 1}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [CALL, 5]}], "messages[0].tool_calls[1]"),
        (
            [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}],
            "messages[0].tool_calls[0].type",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls[0].function",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f"}}]}],
            "messages[1].tool_calls[1].function.arguments",
        ),
        *(
            ([USER, {"role": "assistant", "tool_calls": [call]}], f"messages[1].tool_calls[0].{at}")
            for call, at in (
                ({key: CALL[key] for key in ("type", "function")}, "id"),
                ({key: CALL[key] for key in ("id", "function")}, "type"),
                ({**CALL, "id": 5}, "id"),
            )
        ),
    ],
)
def test_bad_messages_name_their_place(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        message_checks.check_messages(messages)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_legal_messages_pass() -> None:
    message_checks.check_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ]
    )


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
        message_checks.check_tools({"tools": [tool]})
    assert caught.value.param == param


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}], "m[0].content[1]"),
        ([{"role": "user", "content": [{**IMAGE, "type": "text"}]}], "m[0].content[0]"),
        ([USER, {"role": "user", "content": [{"type": "input_image"}]}], "m[1].content[0]"),
        ([{"type": "input_file", "file_url": "http://x"}], "m[0]"),
        (
            [{"content": [{"type": "tool_result", "content": [IMAGE]}]}],
            "m[0].content[0].content[0]",
        ),
        ([{"type": "function_call_output", "output": [IMAGE]}], "m[0].output[0]"),
    ],
)
def test_a_text_model_is_given_text_only(items: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        message_checks.check_media(items, "m")
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("items", [None, "x", [USER], [5], [{"type": ["image"]}], [{"content": 5}]])
def test_text_and_what_is_no_message_pass(items: Any) -> None:
    message_checks.check_media(items, "m")


@pytest.mark.parametrize("kind", ["tool_addition", "tool_removal"])
@pytest.mark.parametrize("role", ["system", "user", None], ids=str)
def test_blocks_that_change_the_tools_are_refused(kind: str, role: str | None) -> None:
    """What they define would pass by every check of `tools`."""
    definition = {"type": "tool_definition", "definition": {"name": "f", "input_schema": {}}}
    blocks = [{"type": "text", "text": "hi"}, {"type": kind, "tool": definition}]
    payload: dict[str, Any] = {"messages": [{"role": role, "content": blocks}]}
    if role is None:
        payload = {"messages": [USER], "system": blocks}
    with pytest.raises(ApiError, match="'tools'") as caught:
        message_checks.check_blocks(payload)
    place = "messages[0].content" if role else "system"
    assert (caught.value.status, caught.value.param) == (400, f"{place}[1].type")


@pytest.mark.parametrize(
    ("kind", "field", "right", "wrong"),
    [
        ("text", "text", "", 5),
        ("thinking", "thinking", "Hm.", []),
        ("image", "source", {"type": "url", "url": "http://x"}, "http://x"),
    ],
)
def test_a_block_without_its_content_is_refused(
    kind: str, field: str, right: Any, wrong: Any
) -> None:
    """Catches: a block that vLLM drops without a word."""
    whole = {"type": kind, field: right}
    message_checks.check_blocks({"messages": [{"role": "user", "content": [whole]}]})
    for broken in ({"type": kind}, {"type": kind, field: wrong}):
        payload = {"messages": [USER, {"role": "user", "content": [whole, broken]}]}
        with pytest.raises(ApiError) as caught:
            message_checks.check_blocks(payload)
        assert (caught.value.status, caught.value.param) == (
            400,
            f"messages[1].content[1].{field}",
        )


def test_a_system_prompt_is_text() -> None:
    """Catches: a block of another kind that vLLM drops without a word."""
    text, image = {"type": "text", "text": "x"}, {"type": "image", "source": {}}
    for payload, place in (
        ({"system": [text, image], "messages": [USER]}, "system"),
        ({"messages": [USER, {"role": "system", "content": [text, image]}]}, "messages[1].content"),
    ):
        with pytest.raises(ApiError, match="must be 'text'") as caught:
            message_checks.check_blocks(payload)
        assert (caught.value.status, caught.value.param) == (400, f"{place}[1].type")
    with pytest.raises(ApiError, match="Missing") as caught:
        message_checks.check_blocks({"system": [{"type": "text"}]})
    assert caught.value.param == "system[0].text"
