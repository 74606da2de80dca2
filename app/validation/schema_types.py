"""The types and values that a JSON schema allows, as far as it states them. No vllm import."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Keywords by the type of the values that they apply to; `number` stands for integers too.
FAMILIES: dict[str, tuple[str, ...]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
        *("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"),
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("required", "minProperties", "maxProperties", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    ),
}


# Most values and names of one document that are compared for its `oneOf`: 5 ms.
MAX_COMPARED = 65_536

_text_of = json.JSONEncoder(sort_keys=True).encode


class SchemaTypes:
    """Types and listed values of the subschemas of one document, whose references it follows.

    Each subschema is read once, however many references lead to it.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.compared = 0
        # By the schema's identity, beside the schema itself, which keeps its identity from reuse.
        self._types: dict[tuple[int, bool], tuple[Any, set[str] | None]] = {}
        self._texts: dict[int, tuple[Any, frozenset[str] | None]] = {}
        self._disjoint: dict[tuple[int, ...], bool] = {}

    def of(self, schema: Any, *, stated: bool = False) -> set[str] | None:
        """Types of the values that the schema is meant for; None if it may be any.

        A schema without `type` is meant for the types that its keywords apply to, but values of all
        other types match it too: with `stated` it may be any.
        """
        try:
            return self._of(schema, stated)
        except RecursionError:  # hundreds of references, each of which leads to the next
            return None

    def _of(self, schema: Any, stated: bool) -> set[str] | None:
        if not isinstance(schema, dict):
            return None
        key = id(schema), stated
        if key not in self._types:
            self._types[key] = schema, None  # while it is read: a reference to itself
            self._types[key] = schema, self._read(schema, stated)
        return self._types[key][1]

    def _read(self, schema: Mapping[str, Any], stated: bool) -> set[str] | None:
        if isinstance(reference := schema.get("$ref"), str):
            return self._of(self.target(reference), stated)
        if "const" in schema:
            return {type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            return {type_of(value) for value in schema["enum"]}
        for choice in ("anyOf", "oneOf"):
            if isinstance(schema.get(choice), list):
                each = [self._of(item, stated) for item in schema[choice]]
                return None if None in each else {kind for kinds in each for kind in kinds or ()}
        if isinstance(schema.get("allOf"), list):
            each = [self._of(item, stated) for item in schema["allOf"]]
            return next((kinds for kinds in each if kinds), None)
        types = listed(schema.get("type"))
        return set(types or ([] if stated else meant_types(schema))) or None

    def are_disjoint(self, schemas: Any) -> bool:
        """Whether no value can match two of the schemas: by their types, by the values that they
        list, or by a required property that tells objects apart.

        Values of types that a schema is not meant for count if another is meant for them. False
        also where the document has had more compared than `MAX_COMPARED`.
        """
        if not isinstance(schemas, list):
            return True
        if self.compared > MAX_COMPARED:
            return False
        resolved = [self._resolved(schema) for schema in schemas]
        key = tuple(map(id, resolved))
        if key not in self._disjoint:
            self._disjoint[key] = self._are_disjoint(schemas, resolved)
        return self._disjoint[key]

    def _are_disjoint(self, schemas: list[Any], resolved: list[Any]) -> bool:
        groups: dict[str, list[Any]] = {}
        unstated: list[set[str]] = []  # families of schemas that values of all others match
        for schema, target in zip(schemas, resolved, strict=True):
            types = self.of(schema)
            if not types:
                return False
            for family in families(types):
                groups.setdefault(family, []).append(target)
            if self.of(schema, stated=True) is None:
                unstated.append(families(types))
        return all(groups.keys() <= meant for meant in unstated) and all(
            len(group) == 1
            or self._are_distinct(group)
            or (family == "object" and self._have_tag(group))
            for family, group in groups.items()
        )

    def _are_distinct(self, schemas: list[Any]) -> bool:
        """Whether each schema lists its values, and no two list the same."""
        seen: set[str] = set()
        for schema in schemas:
            texts = self._texts_of(schema)
            if texts is None or not self._may_compare(1 + len(texts)):
                return False
            if not seen.isdisjoint(texts):
                return False
            seen |= texts
        return True

    def _have_tag(self, schemas: list[Any]) -> bool:
        """Whether all the objects require one property that has other values in each."""
        named = [required(schema) for schema in schemas]
        if not self._may_compare(sum(map(len, named))):
            return False
        tags = set.intersection(*map(set, named))
        return any(
            self._are_distinct([_property(schema, tag) for schema in schemas])
            for tag in sorted(tags)
        )

    def _may_compare(self, count: int) -> bool:
        """Count what is to be compared; returns whether that is within the document's bound."""
        self.compared += count
        return self.compared <= MAX_COMPARED

    def _texts_of(self, schema: Any) -> frozenset[str] | None:
        """The values that a schema lists, as JSON; None where it lists none."""
        if id(schema) not in self._texts:
            values = _values(schema)
            texts = None if values is None else frozenset(map(_text_of, values))
            self._texts[id(schema)] = schema, texts
        return self._texts[id(schema)][1]

    def _resolved(self, schema: Any) -> Any:
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return self.target(schema["$ref"])
        return schema

    def target(self, reference: Any) -> Any:
        """The schema of this document that a reference leads to, the way xgrammar reads it."""
        if not isinstance(reference, str) or not re.fullmatch(r"#(/[^~%]+)?", reference):
            return None
        target = self.root
        for name in reference.split("/")[1:]:
            target = target.get(name) if isinstance(target, dict) else None
        return target


def listed(types: Any) -> list[str]:
    """`type` as a list of names."""
    if isinstance(types, str):
        return [types]
    return [name for name in types if isinstance(name, str)] if isinstance(types, list) else []


def meant_types(schema: Mapping[str, Any]) -> list[str]:
    """Types that the keywords of a schema without `type` apply to."""
    return [name for name, words in FAMILIES.items() if any(word in schema for word in words)]


def type_of(value: Any) -> str:
    """JSON Schema's name for the type of a JSON value."""
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def allows(types: Iterable[str], kind: str) -> bool:
    """Whether values of one type are among those of `types`."""
    return kind in types or (kind == "integer" and "number" in types)


def families(types: Iterable[str]) -> set[str]:
    """The types, with integers among the numbers."""
    return {"number" if kind == "integer" else kind for kind in types}


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def required(schema: Mapping[str, Any]) -> list[str]:
    """Names that a schema lists as required; nothing where the list is malformed."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None
