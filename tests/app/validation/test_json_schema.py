"""Schemas in the form that xgrammar obeys: what it then lets through keeps the schema."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts_text

from app.validation import schema_types
from app.validation.json_schema import enforceable
from app.validation.schema_types import SchemaTypes

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
        "format": st.sampled_from(["int32", "uri", "json-pointer"]),
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


LONG = 2**256


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "integer", "minimum": 0, "maximum": LONG}, [-1, 0, 2**63 - 1]),
        ({"type": "integer", "minimum": -LONG, "exclusiveMaximum": LONG}, [-5, 0, 2**62]),
        ({"type": "integer", "minimum": -1e300, "maximum": 1e19}, [-(2**63), 5]),
        ({"type": ["integer", "number"], "maximum": LONG}, [1.5, -3]),
        ({"type": "number", "maximum": LONG}, [1.5, -3]),
        ({"type": "string", "maxLength": LONG}, ["", "text"]),
        ({"type": "integer", "default": LONG}, [0]),
    ],
)
def test_bounds_of_more_than_64_bits(schema: Json, values: list[Any]) -> None:
    written, unenforced = enforceable(schema)
    assert unenforced == []
    for value in values:
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert lets_through(written, value) == valid


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "minimum": LONG}, "minimum"),
        ({"type": "integer", "exclusiveMaximum": -LONG}, "exclusiveMaximum"),
        ({"const": LONG}, "const"),
        ({"enum": ["a", {"b": [LONG]}]}, "enum"),
        ({"type": "string", "minLength": LONG}, "minLength"),
    ],
)
def test_what_needs_integers_of_more_than_64_bits_is_left_out(schema: Json, place: str) -> None:
    """xgrammar writes 2**256 as 1.157920892373162e+77, which is no such value."""
    written, unenforced = enforceable(schema)
    assert [each.place for each in unenforced] == [place]
    assert grammar(written) is not None


def test_a_long_integer_is_found_at_any_depth() -> None:
    """Catches: a constant that is nested deeply ends the request with a RecursionError."""
    deep: Any = LONG
    for _ in range(5_000):
        deep = [{"a": deep}]
    assert [each.place for each in enforceable({"const": deep})[1]] == ["const"]


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
        ({"type": "string", "format": "email", "pattern": "^(?!a)"}, "pattern"),
        ({"type": "string", "format": "email", "pattern": "^a", "maxLength": 9}, "maxLength"),
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


# As Zod 4 writes z.uuid(), z.iso.date() and z.iso.datetime().
ZOD_UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
ZOD_DAY = (
    r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29"
    r"|\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
)
ZOD_TIME = r"(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))"
UUID = "123e4567-e89b-12d3-a456-426614174000"


@pytest.mark.parametrize(
    ("kind", "held", "good", "bad"),
    [
        ("uuid", {"pattern": ZOD_UUID}, UUID, UUID.replace("-1", "-9")),
        ("date", {"pattern": f"^{ZOD_DAY}$"}, "2024-02-29", "2023-02-29"),
        ("date-time", {"pattern": f"^{ZOD_DAY}T{ZOD_TIME}$"}, "2024-02-29T10:00Z", "2024-02-29"),
        ("nanoid", {"pattern": "^[a-z]{2}$"}, "ab", "a"),
        ("uri", {"minLength": 1, "maxLength": 2083}, "https://a.example/b", ""),  # HttpUrl
        ("uri", {"minLength": 1}, "https://a.example/b", "no address"),  # AnyUrl
        ("uri-reference", {"minLength": 1}, "/b", ""),
        ("email", {"maxLength": 9}, "a@b.de", "a@example.com"),
    ],
)
def test_a_format_gives_way_to_what_else_a_text_is_held_to(
    kind: str, held: Json, good: str, bad: str
) -> None:
    """pydantic and Zod write formats beside lengths and patterns."""
    written, unenforced = enforceable({"type": "string", "format": kind, **held})
    assert not unenforced
    assert lets_through(written, good)
    assert not lets_through(written, bad)


NESTING = st.recursive(
    st.one_of(
        st.just({"type": "integer"}),
        st.builds(lambda text: {"description": text}, st.text("d", max_size=40)),
        st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from(["d", "additional1"])),
        st.booleans(),
    ),
    lambda inner: st.fixed_dictionaries(
        {"required": st.lists(st.text("abcd", min_size=1, max_size=2), max_size=6)},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "additionalProperties": inner,
            "unevaluatedProperties": inner,
        },
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(schema=NESTING, definition=NESTING)
def test_the_enforceable_form_is_a_small_multiple_of_the_schema(
    schema: Any, definition: Any
) -> None:
    """A reference for each required name, and one definition for each of their subschemas."""
    given = {"$defs": {"d": definition, "additional1": {}}, "allOf": [schema]}
    written, _ = enforceable(given)
    assert len(json.dumps(written)) <= 12 * len(json.dumps(given))


def repeated(depth: int) -> Json:
    """A required name without a property at each level, which the next level describes."""
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "required": ["a"], "additionalProperties": schema}
    return schema


def test_nested_required_names_are_enforced_and_do_not_double_a_schema_at_each_level() -> None:
    schema, value = repeated(45), json.loads('{"a": ' * 45 + "1" + "}" * 45)
    written, unenforced = enforceable(schema)
    assert not unenforced
    assert len(json.dumps(written)) <= 3 * len(json.dumps(schema))
    assert enforceable(written) == (written, [])
    assert lets_through(written, value)
    assert not lets_through(written, value["a"])


def test_many_required_names_share_one_schema() -> None:
    rest = {"type": "integer", "description": "x" * 14_000}
    names = [f"n{number}" for number in range(400)]
    schema = {"type": "object", "required": names, "additionalProperties": rest}
    written, unenforced = enforceable(schema)
    assert not unenforced
    assert list(written["properties"]) == names
    assert json.dumps(written).count(rest["description"]) == 1
    assert len(json.dumps(written)) <= 3 * len(json.dumps(schema))


@pytest.mark.parametrize("keyword", ["additionalProperties", "unevaluatedProperties"])
def test_a_required_name_is_held_to_what_other_properties_are(keyword: str) -> None:
    """Also at a level below another one, and where the document's own names are taken."""
    inner = {"type": "object", "required": ["b"], keyword: {"type": "integer"}}
    schema = {
        "type": "object",
        "$defs": {"additional1": {"type": "string"}},
        "properties": {"own": {"$ref": "#/$defs/additional1"}},
        "required": ["own", "a"],
        keyword: inner,
    }
    written, unenforced = enforceable(schema)
    assert not unenforced
    assert lets_through(written, {"own": "x", "a": {"b": 1}})
    for wrong in ({"own": "x", "a": {"b": "1"}}, {"own": "x", "a": {}}, {"own": "x"}, {"own": 1}):
        assert not lets_through(written, wrong)


def test_a_reference_into_a_shared_schema_is_not_lost_in_silence() -> None:
    """The schema has another place then: the engine is given no grammar that ignores it."""
    rest = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"c": {"$ref": "#/additionalProperties/properties/b"}},
        "required": ["a", "c"],
        "additionalProperties": rest,
    }
    written, _ = enforceable(schema)
    made = grammar(written)
    assert made is None or not accepts_text(made, '{"c": "1", "a": {}}')


def pairs_of(schemas: Json, times: int = 1) -> Json:
    """A list whose items are one of two of the schemas: all pairs, each so many times."""
    pairs = itertools.combinations([{"$ref": f"#/$defs/{name}"} for name in schemas], 2)
    items = [{"oneOf": list(pair)} for pair in pairs for _ in range(times)]
    return {"$defs": schemas, "type": "array", "prefixItems": items}


def test_listed_values_are_read_once_however_often_they_are_referred_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Any] = []
    text_of = schema_types._text_of

    def count(value: Any) -> str:
        read.append(value)
        return text_of(value)

    monkeypatch.setattr(schema_types, "_text_of", count)
    enums = {name: {"enum": list(range(n, n + 10_000))} for n, name in ((0, "A"), (10_000, "B"))}
    assert enforceable(pairs_of(enums, 480))[1] == []
    assert len(read) == 20_000
    read.clear()
    three = {name: {"enum": [f"{name}{n}" for n in range(500)]} for name in "ABC"}
    assert enforceable(pairs_of(three, 50))[1] == []
    assert len(read) == 1_500


def test_verdicts_are_remembered() -> None:
    enums = {name: {"enum": [f"{name}{n}" for n in range(10_000)]} for name in "AB"}
    types = SchemaTypes(pairs_of(enums, 480))
    assert all(types.are_disjoint(item["oneOf"]) for item in types.root["prefixItems"])
    assert types.compared == 20_002


@pytest.mark.parametrize(
    ("schemas", "largest"),
    [
        ({f"e{n}": {"enum": [f"{n}-{m}" for m in range(500)]} for n in range(40)}, 1_002),
        (
            {
                f"o{n}": {"required": [f"n{m}" for m in range(500)], "properties": {}}
                for n in range(20)
            },
            2_000,
        ),
    ],
    ids=["enums", "required names"],
)
def test_comparisons_of_one_document_are_bounded(schemas: Json, largest: int) -> None:
    """Another pair each time: no verdict is remembered."""
    types = SchemaTypes(pairs_of(schemas))
    for item in types.root["prefixItems"]:
        types.are_disjoint(item["oneOf"])
    assert schema_types.MAX_COMPARED < types.compared <= schema_types.MAX_COMPARED + largest
    assert not types.are_disjoint(types.root["prefixItems"][-1]["oneOf"])
    unenforced = enforceable(types.root)[1]
    assert {each.place.split(".")[-1] for each in unenforced} == {"oneOf"}


def test_a_long_chain_of_references_is_read() -> None:
    definitions: Json = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(2_000)}
    schema = {"$defs": {**definitions, "d2000": {}}, "type": "integer", "$ref": "#/$defs/d0"}
    assert [each.place for each in enforceable(schema)[1]] == ["type"]


def test_a_document_that_refers_to_itself_is_read_once() -> None:
    """Each definition stands twice in the one before it: 2 to the 40 paths."""
    definitions: Json = {
        f"d{n}": {"type": "object", "anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)
    }
    schema = {"$defs": {**definitions, "d40": {"$ref": "#"}}, "$ref": "#/$defs/d0"}
    assert {each.place.split(".")[-1] for each in enforceable(schema)[1]} <= {"type"}
