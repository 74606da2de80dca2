"""Schemas in the form that xgrammar obeys: what it then lets through keeps the schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts_text

from app.validation.json_schema import enforceable

Json = dict[str, Any]

NAMES = st.sampled_from(["a", "b", "z"])
SMALL = st.integers(0, 3)
BOUNDS = st.one_of(st.integers(-2, 3), st.sampled_from([0.5, 1.5, 2.0]))
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
SCALARS = st.one_of(
    st.integers(-3, 4),
    st.sampled_from([0.5, 1.5, 2.5]),
    st.text("ab1", max_size=4),
    st.booleans(),
    st.none(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)


def some(keywords: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Json]:
    """Schemas with any of the keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """Schemas of every kind around others, most of them with combinations that nobody means."""
    maps = st.dictionaries(NAMES, inner, max_size=2)
    lists = st.lists(inner, min_size=1, max_size=2)
    kind = {"type": st.one_of(st.sampled_from(TYPES), st.lists(st.sampled_from(TYPES), max_size=2))}
    numbers = dict.fromkeys(
        ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], BOUNDS
    ) | {"multipleOf": st.integers(1, 3)}
    texts = {
        "minLength": SMALL,
        "maxLength": SMALL,
        "pattern": st.sampled_from(["^a+$", "^[ab]{2}$", "^(a|b)1?$", "^a$|^b$", "^(?!a)b$"]),
        "format": st.sampled_from(["int32"]),
    }
    arrays = {
        "items": st.one_of(inner, st.booleans()),
        "prefixItems": lists,
        "minItems": SMALL,
        "maxItems": SMALL,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "unevaluatedItems": st.booleans(),
    }
    objects = {
        "properties": maps,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": st.one_of(inner, st.booleans()),
        "unevaluatedProperties": st.booleans(),
        "minProperties": SMALL,
        "maxProperties": SMALL,
        "patternProperties": st.dictionaries(st.sampled_from(["^a$", "^[ab]$"]), inner, max_size=2),
        "propertyNames": st.sampled_from([{"pattern": "^a$"}, {"enum": ["a", "b"]}]),
        "dependentRequired": st.just({"a": ["b"]}),
    }
    choices = {
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "anyOf": lists,
        "oneOf": lists,
        "allOf": lists,
        "$ref": st.sampled_from(["#", "#/$defs/d", "#/properties/a", "#/no"]),
    }
    never = {"not": inner, "if": inner, "then": inner}
    each = (numbers, texts, arrays, objects)
    return st.one_of(
        *(some({**kind, **words}) for words in each),
        *(some({**kind, name: words}) for name, words in choices.items()),
        some({**kind, **numbers, **texts, **arrays, **objects, **choices, **never}),
    )


SCHEMAS = st.recursive(
    st.one_of(some({"type": st.sampled_from(TYPES)}), st.booleans()), deeper, max_leaves=5
).filter(lambda schema: isinstance(schema, dict))


def grammar(schema: Any) -> Grammar | None:
    """The grammar of a schema; None where xgrammar says that there is none."""
    try:
        return Grammar.from_json_schema(json.dumps(schema))
    except Exception:
        return None


def lets_through(schema: Any, value: Any) -> bool:
    made = grammar(schema)
    assert made is not None
    return bool(accepts_text(made, json.dumps(value)))


def is_valid(validator: jsonschema.Draft202012Validator, value: Any) -> bool:
    """Whether the value keeps the schema; a reference that leads to itself says nothing."""
    try:
        return validator.is_valid(value)
    except RecursionError:
        return True


@settings(max_examples=300)
@given(schema=SCHEMAS, definition=SCHEMAS, values=st.lists(VALUES, min_size=4, max_size=12))
@example(schema={"enum": [{"a": None}]}, definition={}, values=[{}, {"a": None}, 0, []])
@example(
    schema={"const": [{"minLength": 1}]}, definition={}, values=[[{"minLength": 1}], [], 0, {}]
)
@example(  # 0 matches both: keywords of strings say nothing of it
    schema={"oneOf": [{"type": "integer"}, {"minLength": 0}]}, definition={}, values=[0, "", [], {}]
)
def test_what_is_let_through_keeps_the_schema(
    schema: Json, definition: Json, values: list[Any]
) -> None:
    schema = {**schema, "$defs": {"d": definition}}
    written, unenforced = enforceable(schema)
    made = None if unenforced else grammar(written)
    if made is None:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        if accepts_text(made, json.dumps(value)):
            assert is_valid(validator, value), (value, written)


@settings(max_examples=100)
@given(schema=SCHEMAS)
@example(schema={"allOf": [{"type": "array"}, {"maxItems": 2}]})
@example(schema={"type": "object", "$ref": "#/$defs/missing"})
def test_what_is_left_after_leaving_out_needs_nothing_left_out(schema: Json) -> None:
    """But for `oneOf`, which stays as if it were `anyOf`."""
    written, _ = enforceable(schema)
    again, unenforced = enforceable(written)
    assert again == written
    assert all(each.place.split(".")[-1] == "oneOf" for each in unenforced)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": "string", "format": "phone"}, "format"),
        ({"type": "string", "format": "email", "maxLength": 9}, "maxLength"),
        ({"type": "string", "pattern": "^(?=a)"}, "pattern"),
        ({"type": "string", "pattern": r"^\bword"}, "pattern"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "properties.a.items.not"),
        ({"properties": {}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"type": "integer", "anyOf": [{"type": "string"}]}, "type"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"anyOf": [{}, {"allOf": [{"type": "object"}, {}]}]}, "anyOf[1].allOf"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
        ({"$ref": "#/$defs/nothing"}, "$ref"),
        ({"$defs": {"x": {"type": "date"}}, "$ref": "#/$defs/x"}, "$defs.x.type"),
        ({"required": ["a"], "additionalProperties": False}, "required"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_enforced_is_named(schema: Json, place: str) -> None:
    assert enforceable(schema)[1][0].place == place


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minimum": 3}, 4, 2),
        ({"minLength": 2}, "ab", "a"),
        ({"type": "array", "minItems": 2}, [1, 2], [1]),
        ({"type": "array", "items": [{"type": "integer"}]}, [1], ["a"]),
        ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
        ({"type": "object", "required": ["a"]}, {"a": 1}, {}),
        ({"type": "object", "properties": {"a": False, "b": {}}}, {"b": 1}, {"a": 1}),
        ({"type": "integer", "minimum": 2.5}, 3, 2),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, 4, 3),
        ({"type": "string", "enum": ["a", 1]}, "a", 1),
        ({"type": "object", "anyOf": [{"type": "object", "required": ["a"]}]}, {"a": 1}, {}),
        ({"type": ["string", "null"], "maxLength": 1, "description": None}, None, "ab"),
        ({"anyOf": [False, {"type": "integer"}]}, 1, "a"),
        ({"uniqueItems": False}, [1, 1], 1),
        (
            {
                "discriminator": {"propertyName": "kind"},
                "oneOf": [
                    {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
                    for kind in ("cat", "dog")
                ],
            },
            {"kind": "cat"},
            {"kind": "cow"},
        ),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_xgrammar_would_miss_is_written_so_that_it_does_not(
    schema: Json, good: Any, bad: Any
) -> None:
    written, unenforced = enforceable(schema)
    assert not unenforced
    assert lets_through(written, good)
    assert not lets_through(written, bad)


def test_a_document_that_refers_to_itself_is_read_once() -> None:
    """Each definition stands twice in the one before it: 2 to the 40 paths."""
    definitions: Json = {
        f"d{n}": {"type": "object", "anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)
    }
    schema = {"$defs": {**definitions, "d40": {"$ref": "#"}}, "$ref": "#/$defs/d0"}
    assert {each.place.split(".")[-1] for each in enforceable(schema)[1]} <= {"type"}
