"""Prompts from JSON lines: what is read, what is refused, and the errors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.validation.replay import chat_messages
from drafters.train.data.examples import Example, MalformedLine, encode, read_examples
from tests.drafters.train.tiny import BEGIN, TURN_END, tokenizer

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def _file(folder: Path, *lines: bytes | str | dict, name: str = "a.jsonl") -> Path:
    file = folder / name
    encoded = [
        line if isinstance(line, bytes) else
        (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]  # fmt: skip
    file.write_bytes(b"\n".join(encoded))
    return file


def test_both_kinds_are_read_in_order(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    function = {"name": "f", "description": None, "parameters": None}
    described = [{"type": "function", "function": function}]
    first = _file(tmp_path, {"prompt": "def f(", "task_id": 7}, "", "  \r", {"messages": [USER]})
    second = _file(tmp_path, {"messages": [USER], "tools": tools, "prompt": None}, name="b.jsonl")
    examples = read_examples([first, second])
    assert examples == [
        Example(messages=None, prompt="def f("),
        Example(messages=(USER,), prompt=None),
        Example(messages=(USER,), prompt=None, tools=described),
    ]
    assert [example.where for example in examples] == [f"{first}:1", f"{first}:4", f"{second}:1"]


def test_the_assistants_last_word_is_dropped_and_earlier_ones_stay(tmp_path: Path) -> None:
    file = _file(tmp_path, {"messages": [USER, ANSWER, USER, ANSWER, ANSWER]})
    assert read_examples([file])[0].messages == (USER, ANSWER, USER)


def test_text_parts_become_one_string(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    file = _file(tmp_path, {"messages": [{"role": "user", "content": parts}]})
    assert read_examples([file])[0].messages == ({"role": "user", "content": "a\nb"},)


def test_an_answer_of_tool_calls_alone_has_empty_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    reply = {"role": "tool", "content": "4"}
    messages = read_examples([_file(tmp_path, {"messages": [USER, call, reply]})])[0].messages
    assert messages == (USER, {**call, "content": ""}, reply)


@pytest.mark.parametrize(
    ("given", "rendered"),
    [('{"x": 1}', {"x": 1}), ("", {}), (None, {}), ("[1]", {}), ("{", {}), ([1], {})],
)
def test_arguments_of_calls_are_objects_as_in_service(
    tmp_path: Path, given: object, rendered: dict
) -> None:
    """The fault: text, as OpenAI's clients send it, was rendered as text, or refused."""
    spelled = []
    for arguments in (given, rendered):
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        line = {"messages": [USER, turn, {"role": "tool", "content": "4"}]}
        spelled.append(read_examples([_file(tmp_path, line)])[0].messages)
    assert spelled[0] == spelled[1]


SYSTEM, DEVELOPER = (
    {"role": role, "content": f"of the {role}"} for role in ("system", "developer")
)
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "4"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
# Writes all that a template may read of a conversation.
WHOLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning }}|{{ m.reasoning_content }}|"
    "{{ m.content }}|{{ m.tool_calls | default([]) | tojson }}{% endfor %}{{ tools | tojson }}"
)


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [USER, {**ANSWER, "reasoning": "so"}, USER]},
        {"messages": [USER, {**ANSWER, "reasoning_content": "so"}, USER]},
        {"messages": [USER, {**CALLING, "reasoning": "so"}, RESULT]},
        {"messages": [DEVELOPER, USER]},
        {"messages": [SYSTEM, DEVELOPER, USER, ANSWER, DEVELOPER, USER]},
        {"messages": [SYSTEM, USER, SYSTEM, USER]},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [USER], "tools": [{
            "function": {"parameters": SCHEMA, "strict": True, "name": "f", "description": "d"},
            "type": "function",
        }]},
    ],
    ids=["reasoning", "reasoning_content", "reasoning before a call", "a developer", "developers",
         "systems", "a bare tool", "a whole tool"],
)  # fmt: skip
@pytest.mark.parametrize("template", [WHOLE, WHOLE + "{# 'developer' #}"], ids=["", "developer"])
def test_conversations_are_rendered_as_in_service(
    tmp_path: Path, line: dict[str, Any], template: str
) -> None:
    """The fault: a head learned prompts that are never served."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import safe_apply_chat_template

    reader = tokenizer()
    reader.chat_template = template
    ids = encode(read_examples([_file(tmp_path, line)])[0], reader, max_tokens=10_000)
    model: Any = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
    messages: Any = chat_messages(copy.deepcopy(line["messages"]))
    conversation, _, _ = parse_chat_messages(messages, model, "string")
    tools = [ChatCompletionToolsParam(**tool).model_dump() for tool in line.get("tools", [])]
    served = safe_apply_chat_template(
        model, reader, conversation, tools=tools or None, chat_template=template, tokenize=False,
        add_generation_prompt=True,
    )  # fmt: skip
    assert ids is not None and reader.decode(ids) == served


def test_only_a_newline_ends_a_line_and_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    file = _file(tmp_path, b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b\xc2\x85c"}\r')
    assert [example.prompt for example in read_examples([file])] == ["a\u2028b\x85c"]


BAD = [
    (b'{"prompt": "\xff"}', "not UTF-8: invalid start byte at byte 13"),
    ('{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15"),
    ('{"prompt": "a"} x', "not JSON: Extra data at column 17"),
    ("[" * 100_000, "not JSON that can be read: nested too deeply"),
    ('{"prompt": "a", "n": NaN}', "NaN is not JSON"),
    ('{"prompt": "a", "prompt": "b"}', "duplicate key 'prompt'"),
    ('{"prompt": "\\ud800"}', "text with an unpaired surrogate"),
    ('["a"]', "a line must be an object, got a list"),
    ("null", "a line must be an object, got null"),
    ('{"text": "a"}', "neither `messages` nor `prompt`"),
    ({"messages": [USER], "prompt": "a"}, "both `messages` and `prompt`"),
    ('{"prompt": 3}', "`prompt` must be a string, got a number"),
    ('{"prompt": ""}', "`prompt` is empty"),
    ({"prompt": "a", "tools": [{}]}, "`tools` need `messages`"),
    ('{"messages": "hi"}', "`messages` must be a list, got a string"),
    ('{"messages": []}', "`messages` is empty"),
    ({"messages": [ANSWER]}, "`messages` has only the assistant's"),
    ({"messages": [USER, "hi"]}, "`messages[1]` must be an object, got a string"),
    ({"messages": [{"content": "a"}]}, "`messages[0]` has no role"),
    (
        {"messages": [{"role": "human", "content": "a"}]},
        "`messages[0].role` must be one of system, developer, user, assistant, tool, got 'human'",
    ),
    (
        {"messages": [{"role": ["user"], "content": "a"}]},
        "`messages[0].role` must be one of system, developer, user, assistant, tool, got ['user']",
    ),
    ({"messages": [{"role": "user"}]}, "`messages[0]` has no content"),
    (
        {"messages": [{"role": "user", "content": True}]},
        "`messages[0].content` must be a string, got a boolean",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "`messages[0].content` has a part that is not text",
    ),
    ({"messages": [USER], "tools": {}}, "`tools` must be a list of objects"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[reason[:30] for _, reason in BAD])
def test_a_malformed_line_is_named_and_fatal_or_skipped(
    tmp_path: Path, line: bytes | str | dict, reason: str
) -> None:
    file = _file(tmp_path, {"prompt": "one"}, "", line, {"prompt": "four"})
    with pytest.raises(MalformedLine) as caught:
        read_examples([file])
    assert str(caught.value) == f"{file}:3: {reason}"
    assert (caught.value.file, caught.value.line) == (file, 3)
    reports: list[str] = []
    examples = read_examples([file], malformed="skip", report=reports.append)
    assert [example.prompt for example in examples] == ["one", "four"]
    assert reports == [f"{file}:3: {reason}", "skipped 1 malformed of 3 lines"]


def test_no_good_line_is_an_error_in_any_mode(tmp_path: Path) -> None:
    reports: list[str] = []
    for file in (_file(tmp_path), _file(tmp_path, "x", name="b.jsonl")):
        with pytest.raises(ValueError, match="not one prompt in"):
            read_examples([file], malformed="skip", report=reports.append)


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=30), max_size=6))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, lines: list) -> None:
    file = tmp_path_factory.mktemp("any") / "a.jsonl"
    file.write_bytes(b"\n".join([*lines, b'{"prompt": "good"}']))
    examples = read_examples([file], malformed="skip", report=lambda line: None)
    assert examples[-1].prompt == "good"


@settings(max_examples=30)
@given(st.text(min_size=1), st.booleans())
def test_any_text_survives(
    tmp_path_factory: pytest.TempPathFactory, text: str, ascii_only: bool
) -> None:
    file = tmp_path_factory.mktemp("any") / "a.jsonl"
    file.write_text(json.dumps({"prompt": text}, ensure_ascii=ascii_only), encoding="utf-8")
    assert read_examples([file])[0].prompt == text


@pytest.mark.parametrize("both", [True, False])
def test_an_example_is_one_of_the_two(both: bool) -> None:
    with pytest.raises(ValueError, match="either messages or a prompt"):
        Example(messages=(USER,) if both else None, prompt="a" if both else None)


def test_plain_text_gets_the_tokenizers_own_special_tokens() -> None:
    ids = encode(Example(messages=None, prompt="ab"), tokenizer(), max_tokens=3)
    assert ids is not None
    assert ids[0] == BEGIN
    assert tokenizer().decode(ids[1:]) == "ab"


def test_chat_gets_the_templates_special_tokens_once() -> None:
    example = Example(messages=(USER,), prompt=None, tools=[{}, {}])
    ids = encode(example, tokenizer(), max_tokens=1000)
    assert ids is not None
    assert (ids.count(BEGIN), ids.count(TURN_END)) == (1, 1)
    assert tokenizer().decode(ids) == "<s>user: hi<|im_end|>tools: 2assistant: "


def test_a_prompt_that_is_too_long_is_none() -> None:
    example = Example(messages=None, prompt="abc")
    assert encode(example, tokenizer(), max_tokens=4) is not None
    assert encode(example, tokenizer(), max_tokens=3) is None


def test_messages_need_a_template_that_takes_them() -> None:
    example = Example(messages=(USER,), prompt=None, where="a.jsonl:7")
    with pytest.raises(ValueError, match=r"a\.jsonl:7: the tokenizer has no chat template"):
        encode(example, tokenizer(chat=False), max_tokens=9)
    refusing = tokenizer()
    refusing.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ValueError, match=r"a\.jsonl:7: the chat template.*no users here"):
        encode(example, refusing, max_tokens=9)
