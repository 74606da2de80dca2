"""The bound of what a constraint forces: small for what clients send, and infinite where a text
need not end."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from bench.workloads import extraction, tool_calls
from bench.workloads.constraints import NAMED
from drafters.vllm.scheduling.forced_length import forced_length


def of_schema(schema: Any) -> float:
    return forced_length("JSON", json.dumps(schema))


def of_format(content: Any) -> float:
    tag = {"type": "structural_tag", "format": content}
    return forced_length("STRUCTURAL_TAG", json.dumps(tag))


TREE = {
    "type": "object",
    "properties": {"children": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    "required": ["children"],
}
OTHERS = {"object": "additionalProperties", "array": "items"}
CHAIN = {
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": {"const": "x" * 50}},
    "$ref": "#/$defs/a",
}


@pytest.mark.parametrize(
    ("kind", "constraint"),
    [
        ("GRAMMAR", 'root ::= "a" x\nx ::= "b" root'),
        ("GRAMMAR", 'root ::= "a" | x'),
        ("JSON", json.dumps({"type": "array", "minItems": 1, "items": {"$ref": "#"}})),
        ("JSON", json.dumps(TREE)),
        ("JSON", json.dumps({"$ref": "#/$defs/missing"})),
        ("JSON", json.dumps({"type": "array", "items": {"enum": []}})),
        ("JSON", json.dumps({"anyOf": [{"anyOf": []}, False]})),
        ("JSON", "{"),
        ("STRUCTURAL_TAG", "[]"),
        ("STRUCTURAL_TAG", json.dumps({"structures": [3], "triggers": []})),
    ],
)
def test_what_need_not_end_is_infinite(kind: str, constraint: str) -> None:
    assert forced_length(kind, constraint) == math.inf


@pytest.mark.parametrize(
    "content",
    [
        {"type": "grammar", "grammar": 'root ::= "a"'},
        {"type": "star", "content": {"type": "grammar", "grammar": 'root ::= "a"'}},
        {"type": "json_schema", "json_schema": TREE},
        {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": {"type": "token"}},
        {"type": "token", "token": 3},
        {"type": "json_schema", "json_schema": {"enum": ["a", "b"]}, "excludes": ["b"]},
        {"type": "a later one"},
        None,
    ],
)
def test_a_tag_with_a_part_without_a_bound_is_infinite(content: Any) -> None:
    assert of_format(content) == math.inf
    assert of_format({"type": "sequence", "elements": [content]}) == math.inf


@pytest.mark.parametrize(
    ("schema", "least"),
    [
        ({"type": "array", "minItems": 1000, "items": {"const": "abc"}}, 7000),
        ({"type": "array", "minItems": 10**30, "items": {"const": "a"}}, 10**6),
        ({"type": "array", "minItems": 30, "items": {"type": "array", "minItems": 30,
            "items": {"type": "array", "minItems": 30, "items": {"enum": [1]}}}}, 27_000),
        ({"type": "object", "propertyNames": {"const": "a"}, "minProperties": 5000,
            "additionalProperties": {"const": 1}}, 25_000),
        ({"type": "object", "patternProperties": {"^a{9}$": {"const": 1}}, "minProperties": 999},
            9000),
        ({"type": "string", "pattern": "(a{100}){100}"}, 10_000),
        ({"const": "x" * 9000}, 9000),
        ({"enum": ["x" * 9000 + "a", "x" * 9000 + "b"]}, 9000),
        ({"anyOf": [{"type": "string"}, {"const": "x" * 9000}]}, 9000),
        ({"type": "number", "minimum": 1e300, "maximum": 1e300}, 300),
        ({"type": "array", "minItems": 5000, "items": {"type": "array", "items": False}}, 10_000),
        ({"type": "array", "minItems": 5000,
            "items": {"type": "object", "additionalProperties": False}}, 10_000),
        (CHAIN, 50),
    ],
)  # fmt: skip
def test_what_a_schema_forces_is_counted(schema: Any, least: int) -> None:
    """The counts multiply, and are as large as the client likes."""
    assert least <= of_schema(schema) < math.inf


@pytest.mark.parametrize("kind", ["object", "array", "string", "number", "integer", "boolean"])
def test_free_values_break_a_forced_text(kind: str) -> None:
    free = {"type": kind, "additionalProperties": True, "items": True}  # as the gateway rewrites it
    free = {name: free[name] for name in ("type", OTHERS.get(kind, "type"))}
    values = {"type": "array", "minItems": 100_000, "items": free}
    assert of_schema(values) < 50


def test_constraints_of_the_workloads_force_little() -> None:
    """Their spans must not be lost."""
    schemas = [each for name in ("_FUNCTION", "_FILE", "_PAGE", "_RULES")
               if (each := getattr(extraction, name))]  # fmt: skip
    schemas += [tool["parameters"] for tool in tool_calls.TOOLS]
    schemas.append(NAMED["json-schema"]["response_format"]["json_schema"]["schema"])
    assert all(of_schema(schema) < 200 for schema in schemas)
    tags = [
        {
            "begin": f'<tool_call>\n{{"name": "{tool["name"]}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool["parameters"]},
            "end": "}\n</tool_call>",
        }
        for tool in tool_calls.TOOLS
    ]
    triggered = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    separated = {"type": "tags_with_separator", "separator": "\n", "tags": tags}
    assert of_format(triggered) < 500
    assert of_format(separated) < 500


def test_a_choice_forces_its_longest_text() -> None:
    grammar = 'root ::= "yes" | "no, \\"never\\"" | "perhaps"'
    assert forced_length("GRAMMAR", grammar) == len('"no, \\"never\\""')
    assert forced_length("JSON_OBJECT", "") < 50
    assert forced_length("REGEX", r"Invoice \d{4}-[A-Z]{2}, (yes|no)") < 500
    assert forced_length("REGEX", "a{100000000}") > 10**6


def test_a_schema_that_is_read_in_many_places_is_read_once() -> None:
    """Each level refers to the next one twice: 2^30 readings, were they not remembered."""
    levels = {
        str(level): {
            "type": "array",
            "prefixItems": [{"$ref": f"#/$defs/{level + 1}"}] * 2,
            "minItems": 2,
        }
        for level in range(30)
    }
    schema = {"$defs": {**levels, "30": {"type": "string"}}, "$ref": "#/$defs/0"}
    assert of_schema(schema) < math.inf


def test_deep_schemas_and_tags_are_infinite_and_no_error() -> None:
    schema: Any = {"const": 1}
    content: Any = {"type": "any_text"}
    for _ in range(200):
        schema = {"type": "array", "items": schema, "minItems": 1}
        content = {"type": "optional", "content": content}
    assert of_schema(schema) == math.inf
    assert of_format(content) == math.inf


def test_requests_with_one_schema_have_it_read_once() -> None:
    schema = json.dumps({"const": "read once"})
    before = forced_length.cache_info().hits
    assert forced_length("JSON", schema) == forced_length("JSON", schema)
    assert forced_length.cache_info().hits == before + 1
