"""Rewrites JSON schemas into the form that xgrammar, the grammar backend, enforces.

xgrammar 0.2.8 silently ignores what it does not know, and most of what stands beside `anyOf` or
`$ref`: the output then breaks its schema. `enforceable` writes a schema in the form that xgrammar
enforces, and lists what it had to leave out. What it keeps is never looser than the schema
(tests/app/validation/test_json_schema.py); it may be tighter: objects hold the properties that are
named, and patterns match whole texts (docs/structured-output.md). No vllm import.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from app.json_structure import INTEGERS
from app.validation.schema_types import (
    FAMILIES,
    SchemaTypes,
    allows,
    families,
    listed,
    meant_types,
    required,
    type_of,
)

Schema = dict[str, Any]

_FAMILY_OF = {keyword: family for family, words in FAMILIES.items() for keyword in words}
_SCALARS = ("boolean", "null", "integer")
_TYPES = frozenset({*FAMILIES, *_SCALARS})
# xgrammar enforces the first of these that a schema has, and nothing beside it.
_CHOICES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NEVER = frozenset(
    {
        *("not", "if", "then", "else", "multipleOf", "contains", "minContains", "maxContains"),
        *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    }
)
_ASSERTIONS = frozenset({"type", *_FAMILY_OF, *_CHOICES, *_NEVER})
# xgrammar holds bounds of integers in 64 bits, and writes longer values as numbers like 1.8e+19.
_TOO_LONG = "it needs integers of more than 64 bits"
_MAY_BE_NULL = ("const", "default", "enum", "examples")
FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
_EMPTY_FORMATS = ("uri-reference", "uri-template", "json-pointer")  # they have an empty text
_ESCAPES_AND_SETS = re.compile(r"\\[^bBpPkAZzG1-9]|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
# Look-around and other extensions, classes and references by escape, anchors inside.
_NO_PATTERN = re.compile(r"\(\?(?!:)|\\|[^(|]\^|\$[^)|]", re.DOTALL)


@dataclass(frozen=True)
class Unenforced:
    """A keyword that the model would not be held to: where it stands in the schema, and why."""

    place: str
    why: str


def enforceable(schema: Any) -> tuple[Any, list[Unenforced]]:
    """The schema in the form that xgrammar enforces, and what was left out of it.

    The form grows with the schema's size alone: a subschema that stands for several properties is
    written once, in `$defs`.
    """
    reader = _Reader(schema)
    written = reader.read(schema, "")
    if reader.shared:
        written["$defs"] = {**_map(written.get("$defs")), **reader.shared}
    return written, reader.unenforced


class _Reader:
    """One pass over a schema."""

    def __init__(self, root: Any) -> None:
        self.types = SchemaTypes(root)
        self.unenforced: list[Unenforced] = []
        self.shared: dict[str, Schema] = {}  # subschemas to add to the document's `$defs`
        self._names = (f"additional{number}" for number in count(1))

    def read(self, value: Any, place: str) -> Any:
        """A subschema at `place` in its enforceable form. True, False and what is no schema are
        returned as they are."""
        if not isinstance(value, dict):
            return value
        schema = {
            key: item for key, item in value.items() if item is not None or key in _MAY_BE_NULL
        }
        for name in ("$defs", "definitions"):
            self._read_map(schema, name, place)
        for name in ("const", "enum"):
            if name in schema and _holds_long(schema[name]):
                self._leave_out(schema, name, place, _TOO_LONG)
        for name in [name for name in schema if name in _NEVER]:
            if _applies(name, schema):
                self._leave_out(schema, name, place, "it is not implemented")
            else:
                del schema[name]
        plain = next((name for name in _FAMILY_OF if name in schema), None)
        for choice in _CHOICES:
            if choice in schema and (plain is None or choice in ("const", "enum")):
                self._read_choice(schema, choice, place)
                if choice in schema:
                    return schema
            elif choice in schema:
                self._leave_out(schema, choice, place, f"it stands beside '{plain}'")
                of_objects = any(name in schema for name in FAMILIES["object"])
                if of_objects and "unevaluatedProperties" not in schema:
                    schema.setdefault(
                        "additionalProperties", True
                    )  # the omitted choice may name some
        self._read_types(schema, place)
        types = listed(schema.get("type"))
        for keyword in _FAMILY_OF.keys() & schema.keys():
            if types and _FAMILY_OF[keyword] not in families(types):
                del schema[keyword]  # it says nothing of values of these types
        self._read_number(schema, types, place)
        self._read_lengths(schema, place)
        self._read_string(schema, types, place)
        if "array" in types:
            self._read_array(schema, place)
        if "object" in types:
            self._read_object(schema, place)
        return schema

    def _leave_out(self, schema: Schema, keyword: str, place: str, why: str) -> None:
        self.unenforced.append(Unenforced(_inside(place, keyword), why))
        schema.pop(keyword, None)

    def _read_map(self, schema: Schema, name: str, place: str) -> None:
        if isinstance(schema.get(name), dict):
            schema[name] = {
                key: self.read(item, _inside(place, f"{name}.{key}"))
                for key, item in schema[name].items()
            }

    def _read_all(self, schema: Schema, name: str, place: str) -> None:
        if isinstance(schema.get(name), list):
            schema[name] = [
                self.read(item, _inside(place, f"{name}[{index}]"))
                for index, item in enumerate(schema[name])
            ]

    def _read_types(self, schema: Schema, place: str) -> None:
        """Add the `type` that keywords imply: without one xgrammar ignores most of them."""
        if "type" in schema:
            types = listed(schema["type"])
            if not types or not _TYPES.issuperset(types):
                self._leave_out(schema, "type", place, "JSON has no such type")
        if "type" not in schema:
            found = meant_types(schema)
            if found:
                schema["type"] = found[0] if len(found) == 1 else found

    # -- one of several -------------------------------------------------------------------------

    def _read_choice(self, schema: Schema, choice: str, place: str) -> None:
        """Reduce the schema to its choice, or at most to a `type` if that has to be left out."""
        if "type" in schema and self._take_type(schema, choice):
            del schema["type"]
        for keyword in [name for name in schema if name in _ASSERTIONS - {choice}]:
            self._leave_out(schema, keyword, place, f"it stands beside '{choice}'")
        if choice == "$ref":
            if self.types.target(schema["$ref"]) is None:
                why = "it must be '#' or lead to a schema of this document, as '#/$defs/name'"
                self._leave_out(schema, choice, place, why)
        elif choice == "oneOf" and not self.types.are_disjoint(schema["oneOf"]):
            # xgrammar reads it as anyOf; where the schema is not strict, it stays in that sense.
            why = "a value may match several of its schemas, or they list too many; use 'anyOf'"
            self.unenforced.append(Unenforced(_inside(place, choice), why))
        elif choice == "allOf" and _length(schema["allOf"]) > 1:
            types = self.types.of(schema)
            self._leave_out(schema, choice, place, "it joins more than one schema")
            if types:
                schema["type"] = sorted(types)
        if choice in ("anyOf", "oneOf") and isinstance(schema.get(choice), list):
            schema[choice] = [item for item in schema[choice] if item is not False]
        if choice in ("anyOf", "oneOf", "allOf"):  # `const` and `enum` list values, no schemas
            self._read_all(schema, choice, place)

    def _take_type(self, schema: Schema, choice: str) -> bool:
        """Whether a `type` beside a choice adds nothing to it, or has been merged into it."""
        types = listed(schema["type"])
        if choice == "enum" and isinstance(schema["enum"], list):
            fitting = [value for value in schema["enum"] if allows(types, type_of(value))]
            if fitting:
                schema["enum"] = fitting
            return bool(fitting)
        known = self.types.of({choice: schema[choice]})
        return known is not None and all(allows(types, kind) for kind in known)

    # -- by type --------------------------------------------------------------------------------

    def _read_number(self, schema: Schema, types: list[str], place: str) -> None:
        for bound, exclusive, towards in (
            ("minimum", "exclusiveMinimum", 1),
            ("maximum", "exclusiveMaximum", -1),
        ):
            if isinstance(flag := schema.get(exclusive), bool):  # as of draft 4
                del schema[exclusive]
                if flag and bound in schema:
                    schema[exclusive] = schema.pop(bound)
            if "integer" not in types:
                continue
            for name in (bound, exclusive):
                value = schema.get(name)
                if isinstance(value, float) and math.isfinite(value) and "number" not in types:
                    inner = name == bound
                    up = (towards == 1) == inner
                    schema[name] = math.ceil(value) if up else math.floor(value)
                self._shorten(schema, name, towards, place)

    def _shorten(self, schema: Schema, name: str, towards: int, place: str) -> None:
        """Keep a bound of integers within 64 bits: the farthest that fits is tighter than one
        beyond it. A bound that no such integer keeps is left out."""
        value = schema.get(name)
        if not isinstance(value, int) and not (isinstance(value, float) and math.isfinite(value)):
            return
        least, most = INTEGERS[0], INTEGERS[-1]
        if not least <= value <= most:
            if (value > most) == (towards == 1):
                self._leave_out(schema, name, place, _TOO_LONG)
            else:
                schema[name] = least if towards == 1 else most

    def _read_lengths(self, schema: Schema, place: str) -> None:
        for name in ("Length", "Items", "Properties"):
            if _holds_long(schema.get(f"max{name}")):
                del schema[f"max{name}"]  # nothing is that long
            if _holds_long(schema.get(f"min{name}")):
                self._leave_out(schema, f"min{name}", place, _TOO_LONG)

    def _read_string(self, schema: Schema, types: list[str], place: str) -> None:
        if isinstance(pattern := schema.get("pattern"), str) and not _is_plain(pattern):
            self._leave_out(
                schema, "pattern", place, "its expression needs more than xgrammar's syntax"
            )
        lengths = ("minLength", "maxLength")
        if "pattern" in schema:
            schema.pop("format", None)  # an annotation; the pattern is what must hold
            for name in lengths:
                if name in schema:
                    self._leave_out(schema, name, place, "it stands beside 'pattern'")
        if "format" not in schema:
            return
        if "string" not in types:
            del schema["format"]  # of numbers: int32, double
        elif schema["format"] not in FORMATS:
            self._leave_out(schema, "format", place, f"formats are {', '.join(sorted(FORMATS))}")
        else:
            shortest = 0 if schema["format"] in _EMPTY_FORMATS else 1
            if "maxLength" in schema or schema.get("minLength", 0) not in range(shortest + 1):
                del schema["format"]  # as beside a pattern
            else:
                schema.pop("minLength", None)

    def _read_array(self, schema: Schema, place: str) -> None:
        if isinstance(schema.get("items"), list):  # as of drafts before 2020-12
            schema["prefixItems"] = schema.pop("items")
            if "additionalItems" in schema:
                schema["items"] = schema["additionalItems"]
        schema.pop("additionalItems", None)
        if schema.get("uniqueItems") is True:
            self._leave_out(schema, "uniqueItems", place, "it is not implemented")
        schema.pop("uniqueItems", None)
        first, least = _length(schema.get("prefixItems")), schema.get("minItems")
        if "unevaluatedItems" not in schema and (
            not first or (isinstance(least, int) and least > first)
        ):
            schema.setdefault("items", True)
        self._read_all(schema, "prefixItems", place)
        for name in ("items", "unevaluatedItems"):
            if name in schema:
                schema[name] = self.read(schema[name], _inside(place, name))

    def _read_object(self, schema: Schema, place: str) -> None:
        patterns = schema.get("patternProperties")
        named = [name for name in ("properties", "required") if schema.get(name)]
        if patterns is not None and (named or _length(patterns) != 1 or "propertyNames" in schema):
            beside = named[0] if named else "propertyNames" if _length(patterns) == 1 else "another"
            self._leave_out(schema, "patternProperties", place, f"it stands beside '{beside}'")
        if "propertyNames" in schema and (named or "unevaluatedProperties" in schema):
            beside = named[0] if named else "unevaluatedProperties"
            self._leave_out(schema, "propertyNames", place, f"it stands beside '{beside}'")
        for name in ("minProperties", "maxProperties"):
            if name in schema and "patternProperties" in schema:
                self._leave_out(schema, name, place, "it stands beside 'patternProperties'")
        others = ("additionalProperties", "unevaluatedProperties")
        if not any(
            name in schema for name in ("properties", "patternProperties", "propertyNames", *others)
        ):
            schema["additionalProperties"] = True
        for name in (*others, "propertyNames"):
            if name in schema:
                schema[name] = self.read(schema[name], _inside(place, name))
        self._read_map(schema, "properties", place)
        self._read_map(schema, "patternProperties", place)
        self._read_names(schema, place)

    def _read_names(self, schema: Schema, place: str) -> None:
        """Rewrite required names that no property describes, and properties that are forbidden."""
        properties = schema.get("properties")
        if isinstance(properties, dict):
            for name in [name for name, item in properties.items() if item is False]:
                del properties[name]
                if schema.get("additionalProperties", False) is not False:
                    where = f"properties.{name}"
                    self.unenforced.append(
                        Unenforced(_inside(place, where), "other properties are allowed")
                    )
        missing = dict.fromkeys(name for name in required(schema) if name not in (properties or {}))
        if not missing:
            return
        others = ("additionalProperties", "unevaluatedProperties")
        keyword = next((name for name in others if name in schema), None)
        rest = True if keyword is None else schema[keyword]
        if rest is False:
            schema["required"] = [name for name in schema["required"] if name not in missing]
            why = f"there can be no property '{next(iter(missing))}'"
            self.unenforced.append(Unenforced(_inside(place, "required"), why))
        elif isinstance(properties, dict | None):
            if keyword is not None and isinstance(rest, dict) and rest:
                # A copy would double the schema at each level of nesting.
                rest = schema[keyword] = self._share(rest)
            schema["properties"] = {**(properties or {}), **dict.fromkeys(missing, rest)}

    def _share(self, schema: Schema) -> Schema:
        """Move a subschema to the document's definitions; returns a reference to it."""
        taken = _map(self.types.root.get("$defs"))
        name = next(name for name in self._names if name not in taken)
        self.shared[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _map(value: Any) -> dict[str, Any]:
    """A map of subschemas; empty where it is malformed."""
    return value if isinstance(value, dict) else {}


def _holds_long(value: Any) -> bool:
    """Whether a JSON value is or holds an integer of more than 64 bits. It may be nested as deeply
    as a client likes: the limit of depth is checked later."""
    level = [value]
    while level:
        if any(isinstance(item, int) and item not in INTEGERS for item in level):
            return True
        lists = [item for item in level if isinstance(item, list)]
        lists += [list(item.values()) for item in level if isinstance(item, dict)]
        level = [item for members in lists for item in members]
    return False


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _applies(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Whether the keyword says something of values that the schema's `type` allows."""
    types, family = listed(schema.get("type")), _FAMILY_OF.get(keyword)
    return family is None or not types or family in families(types)


def _is_plain(pattern: str) -> bool:
    """Whether xgrammar reads a regular expression as JSON Schema means it."""
    return _NO_PATTERN.search(_ESCAPES_AND_SETS.sub("x", pattern)) is None
