"""Schemas, grammars and tools made to break a compiler: refused by name or answered."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from . import shapes
from .bodies import CHAT as PATH
from .bodies import STREAMING
from .gateway import MODEL
from .wire import JSON, assert_error, assert_names, post_chunks, stream

ASK: JSON = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "temperature": 0,
}
TOOL: JSON = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def nested(depth: int) -> JSON:
    schema: JSON = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def fan_out(width: int) -> JSON:
    """Each definition refers twice to the next: 2**width paths."""
    refs: JSON = {
        f"d{i}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}}
        for i in range(width)
    }
    return {"$defs": {**refs, f"d{width}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def repeated(depth: int) -> JSON:
    """A required name without a property at each level, which the next level describes."""
    schema: JSON = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "required": ["a"], "additionalProperties": schema}
    return schema


def schema_format(schema: Any) -> JSON:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def send(http: httpx.Client, body: JSON, streaming: bool) -> httpx.Response | None:
    """The refusal, or None after checking that a 200 is whole and well-formed."""
    if not streaming:
        response = http.post(PATH, json=body)
        if response.status_code == 200:
            shapes.chat(response.json())
            return None
        return response
    with http.stream("POST", PATH, json={**body, "stream": True}) as response:
        if response.status_code != 200:
            response.read()
            return response
    for piece in post_chunks(http, PATH, body):
        shapes.chunk(piece)
    return None


LEGAL_OR_REFUSED: dict[str, JSON] = {
    "self-reference": schema_format({"$ref": "#"}),
    "mutual-references": schema_format(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "deep": schema_format(nested(70)),
    "very-deep": schema_format(nested(400)),
    "fan-out": schema_format(fan_out(24)),
    "nested-required": schema_format(repeated(45)),
    "many-required": schema_format({"type": "object", "required": [f"n{n}" for n in range(2000)]}),
    "tool-nested-required": {
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": repeated(45)}},
        ],
        "tool_choice": "required",
    },
    "empty-enum": schema_format({"enum": []}),
    "impossible-range": schema_format({"type": "integer", "minimum": 5, "maximum": 1}),
    "huge-length": schema_format({"type": "string", "minLength": 10**9}),
    "huge-array": schema_format({"type": "array", "items": {"type": "integer"}, "minItems": 10**7}),
    "everything-allowed": schema_format({}),
    "left-recursion": {"structured_outputs": {"grammar": 'root ::= root "a" | "a"'}},
    "endless-rule": {"structured_outputs": {"grammar": "root ::= a\na ::= root"}},
    "counted-regex": {"structured_outputs": {"regex": "((a{1,500}){1,500}){1,500}"}},
    "nested-stars": {"structured_outputs": {"regex": "(((a*)*)*)*b"}},
    "look-behind": {"structured_outputs": {"regex": "(?<=a)b"}},
    "tool-self-reference": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
        "tool_choice": "required",
    },
    "odd-tool-name": {
        "tools": [{"type": "function", "function": {"name": "../\n\u0000", "parameters": {}}}],
        "tool_choice": "required",
    },
}

NAMED: JSON = {"type": "function", "function": {"name": "f"}}
# By the field that is to be named. More of each kind: tests/app/validation and tests/app/serving.
WRONG: dict[str, dict[str, JSON]] = {
    "response_format": {
        "schema-unknown-type": schema_format({"type": "nonsense"}),
        "schema-dangling-ref": schema_format({"$ref": "#/$defs/none"}),
        "schema-bad-pattern": schema_format({"type": "string", "pattern": "["}),
        "format-unknown": {"response_format": {"type": "yaml"}},
        "format-without-type": {"response_format": {}},
        "format-a-string": {"response_format": "json"},
        "format-a-list": {"response_format": []},
    },
    "structured_outputs": {
        "grammar-empty-rule": {"structured_outputs": {"grammar": "root ::= "}},
        "grammar-empty": {"structured_outputs": {"grammar": ""}},
        "grammar-unclosed": {"structured_outputs": {"grammar": 'root ::= ("a"'}},
        "grammar-undefined-rule": {"structured_outputs": {"grammar": "root ::= missing"}},
        "grammar-no-root": {"structured_outputs": {"grammar": 'other ::= "a"'}},
        "regex-unclosed": {"structured_outputs": {"regex": "("}},
        "choice-empty": {"structured_outputs": {"choice": []}},
    },
    "tools": {
        "tools-a-string": {"tools": "f"},
        "tool-without-function": {"tools": [{"type": "function"}], "tool_choice": NAMED},
    },
    "tool_choice": {
        "choice-of-absent-tool": {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "choice-without-tools": {"tool_choice": "required"},
        "choice-named-without-tools": {"tool_choice": NAMED},
        "choice-unknown": {"tools": [TOOL], "tool_choice": "maybe"},
        "choice-without-function": {"tools": [TOOL], "tool_choice": {"type": "function"}},
        "choice-a-number": {"tools": [TOOL], "tool_choice": 1},
    },
}


@STREAMING
@pytest.mark.parametrize("name", LEGAL_OR_REFUSED)
def test_answered_or_refused(http: httpx.Client, name: str, streaming: bool) -> None:
    refusal = send(http, {**ASK, **LEGAL_OR_REFUSED[name]}, streaming)
    if refusal is not None:
        error = assert_error(refusal, 400)
        assert error["param"], "a refusal names its field"


@STREAMING
@pytest.mark.parametrize(
    ("field", "name"), [(field, name) for field, bodies in WRONG.items() for name in bodies]
)
def test_refused_by_name(http: httpx.Client, field: str, name: str, streaming: bool) -> None:
    refusal = send(http, {**ASK, **WRONG[field][name]}, streaming)
    assert refusal is not None, "accepted what cannot be honoured"
    assert_names(assert_error(refusal, 400), field)


def test_a_grammar_that_leads_nowhere_is_named_when_it_gets_there(http: httpx.Client) -> None:
    """The beginning can be generated: a stream is under way by then."""
    body = {**ASK, "structured_outputs": {"grammar": 'root ::= "ab" x\nx ::= x'}}
    error = assert_error(http.post(PATH, json=body), 400)
    assert_names(error, "structured_outputs")
    frames = [json.loads(e.data) for e in stream(http, PATH, body) if e.data != "[DONE]"]
    assert frames[-1]["error"] == error


def test_the_engine_still_compiles_a_schema(http: httpx.Client) -> None:
    """Runs after the table: the workers that compile grammars are still there."""
    response = http.post(PATH, json={**ASK, "structured_outputs": {"choice": ["yes", "no"]}})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] in {"yes", "no"}
