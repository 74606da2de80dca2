"""The chat template on every message shape that OpenAI's API allows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from drafters.train.embedded.template import CHAT_TEMPLATE, Message, render

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def _template(messages: list[dict[str, Any]], **options: Any) -> str:
    texts, _ = render_jinja_template([messages], chat_template=CHAT_TEMPLATE, **options)
    return str(texts[0])


@pytest.mark.parametrize("prompt", [False, True])
def test_template_equals_the_training_format(prompt: bool) -> None:
    turns: list[Message] = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "  Hi\n"},
        {"role": "assistant", "content": "```python\nx = 1\n```"},
        {"role": "user", "content": "{{ more }}"},
    ]
    for start in (0, 1):
        part = turns[start:]
        got = _template([dict(turn) for turn in part], add_generation_prompt=prompt)
        assert got == render(part, add_generation_prompt=prompt)


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert (
        _template([{"role": "user", "content": parts}]) == "<|im_start|>user\none two<|im_end|>\n"
    )


def test_developer_is_system() -> None:
    got = _template([{"role": "developer", "content": "Be brief."}])
    assert got == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_a_tool_round() -> None:
    got = _template(
        [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3"},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "4"}]},
        ],
        tools=[TOOL],
        add_generation_prompt=True,
    )
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in got
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n" in got
    answers = "\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert got.endswith(f"<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": [], "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "f"}}]},
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": [1]}}}],
        },
        {"role": "assistant", "content": None, "audio": {"id": "a"}},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": ["plain", {"type": "text", "text": "text"}], "name": "ann"},
        {"role": "tool", "content": ""},
        {"role": "function", "name": "add", "content": "3"},
        {"role": "system", "content": "late"},
    ],
)
def test_no_legal_message_fails(message: dict[str, Any]) -> None:
    user = {"role": "user", "content": "Hi"}
    for messages in ([message], [user, message], [message, user]):
        for tools in (None, [TOOL]):
            got = _template(messages, tools=tools, add_generation_prompt=True)
            assert got.endswith("<|im_start|>assistant\n")
            assert got.count("<|im_start|>") == got.count("<|im_end|>") + 1
            assert "None" not in got
