"""An upper bound of how many characters in a row a constraint on an answer can force.

xgrammar follows a forced text to its end, in the scheduler's thread. The end may be far away
(`a{100000000}`), and a grammar such as `root ::= "a" root` has none. The bound is computed from the
constraint itself, before the matcher is asked.

It rests on this: a forced text is the beginning of every text that completes the answer, so it is
not longer than the shortest of them. Neither torch nor vllm is imported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

REMEMBERED = 128  # constraints whose bound is remembered: one of 64 KiB takes 30 ms, 1 KiB 0.5 ms
MOST_REPEATS = 10**6  # larger counts, and products of counts, are as good as this one
MAX_DEPTH = 80  # levels of a schema or tag that are read, references included
FORMAT = 64  # characters of a text of a `format`: a uuid has 36, and its dashes are forced
FRAME = 8  # what stands around a member of an object: quotes, colon, comma, spaces
XML_FRAME = 128  # the same where a tool call is written as XML
DIGITS = 330  # of a bound that is no integer, written without an exponent

_TYPES = ("object", "array", "string", "number", "boolean", "null")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KEYWORDS = {
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": _BOUNDS,
}
_LITERAL = r'"(?:[^"\\\n\r]|\\.)*"'
# A grammar that lists texts, as vLLM writes a `choice`.
_CHOICE = re.compile(rf"root ::= {_LITERAL}(?: \| {_LITERAL})*")
_COUNT = re.compile(r"\{\s*(\d+)")


class Forced(NamedTuple):
    """Most characters that are forced in a row within the texts of a part of a constraint."""

    first: float  # at the beginning of a text
    last: float  # at its end
    longest: float  # anywhere
    whole: float | None  # from the beginning to the end; None if no text is forced as a whole


NOTHING, CHOICE = Forced(0, 0, 0, 0), Forced(0, 0, 0, None)
ANYTHING = Forced(0, 5, 5, None)  # any JSON value: its first character is free
ENDLESS = Forced(math.inf, math.inf, math.inf, math.inf)


@lru_cache(REMEMBERED)
def forced_length(kind: str, constraint: str) -> float:
    """Most characters in a row that a constraint of vLLM forces; infinite where none is known.

    `kind` is the name of a StructuredOutputOptions, `constraint` the text beside it.
    """
    if kind == "JSON":
        return _of_json(constraint, _schema)
    if kind == "JSON_OBJECT":
        return ANYTHING.longest + FRAME
    if kind == "STRUCTURAL_TAG":
        return _of_json(constraint, _tag)
    if kind == "REGEX":
        return _regex(constraint).longest
    if kind == "GRAMMAR" and _CHOICE.fullmatch(constraint):
        return max(map(len, re.findall(_LITERAL, constraint)))
    return math.inf


def _of_json(text: str, read: Callable[[Any], Forced]) -> float:
    try:
        return read(json.loads(text)).longest
    except (ValueError, RecursionError):
        return math.inf


# -- parts and their combinations ---------------------------------------------------------------


def _literal(length: float) -> Forced:
    return Forced(length, length, length, length)


def _then(*parts: Forced) -> Forced:
    """One part after the other."""
    before = NOTHING
    for part in parts:
        whole = None
        if before.whole is not None and part.whole is not None:
            whole = before.whole + part.whole
        first = before.first
        if before.whole is not None:
            first = max(first, before.whole + part.first)
        last = part.last
        if part.whole is not None:
            last = max(last, before.last + part.whole)
        longest = max(before.longest, part.longest, before.last + part.first)
        before = Forced(first, last, longest, whole)
    return before


def _either(parts: Iterable[Forced]) -> Forced:
    """One of the parts."""
    parts = list(parts)
    if not parts:
        return NOTHING
    wholes = [part.whole for part in parts if part.whole is not None]
    return Forced(
        max(part.first for part in parts),
        max(part.last for part in parts),
        max(part.longest for part in parts),
        max(wholes, default=None),
    )


def _optional(part: Forced) -> Forced:
    return _either((NOTHING, part))


def _repeated(part: Forced, least: Any) -> Forced:
    """The part `least` times or more. After that the text may go on with what follows."""
    count = _count(least)
    if count == 0:
        return _optional(part)
    if count == 1 or part.whole is None:
        return _then(*[part] * min(count, 2))
    return _then(_literal(part.whole * (count - 1)), part)


def _count(value: Any) -> int:
    """A count as a schema may name it: also 3.0, or no number at all."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        return 0
    return int(min(value, MOST_REPEATS))


def _regex(pattern: Any) -> Forced:
    """A regular expression: its shortest text has one character for each of its own at most, times
    its counts, which may stand within each other."""
    if not isinstance(pattern, str):
        return ENDLESS
    repeats = 1
    for digits in _COUNT.findall(pattern):
        count = int(digits) if len(digits) < 8 else MOST_REPEATS
        repeats = min(repeats * max(count, 1), MOST_REPEATS)
    return _literal((len(pattern) + 1) * repeats)


# -- JSON schemas -------------------------------------------------------------------------------


def _schema(root: Any, frame: int = FRAME, *, any_order: bool = False) -> Forced:
    return _Schemas(root, frame, any_order=any_order).read(root)


class _Schemas:
    """The subschemas of one document, each of which is read once. A reference to a schema that is
    being read is endless."""

    def __init__(self, root: Any, frame: int, *, any_order: bool) -> None:
        self._root = root
        self._frame = _literal(frame)
        self._any_order = any_order  # members of an object may repeat
        self._seen: dict[int, Forced] = {}  # by the identity of the schema, which the root holds
        self._depth = 0

    def read(self, schema: Any) -> Forced:
        """The bounds of a subschema's values. One that allows none is endless: elsewhere there are
        fewer choices than there seem to be."""
        if not isinstance(schema, Mapping):
            return ENDLESS if schema is False else ANYTHING
        if id(schema) not in self._seen:
            if self._depth >= MAX_DEPTH:
                return ENDLESS
            self._seen[id(schema)] = ENDLESS  # while it is read
            self._depth += 1
            self._seen[id(schema)] = _either(self._readings(schema))
            self._depth -= 1
        return self._seen[id(schema)]

    def _readings(self, schema: Mapping[str, Any]) -> Iterable[Forced]:
        """All that xgrammar may take the schema for, which reads one keyword of several."""
        if "$ref" in schema:
            yield self._target(schema["$ref"])
        if "const" in schema:
            yield _literal(len(json.dumps(schema["const"])))
        if isinstance(values := schema.get("enum"), list):
            texts = {json.dumps(value) for value in values}
            if not texts:
                yield ENDLESS
                return
            listed = _literal(max(map(len, texts)))
            yield listed if len(texts) == 1 else listed._replace(whole=None)
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(schemas := schema.get(name), list):
                yield _either(map(self.read, schemas)) if schemas else ENDLESS
                if name == "allOf" and len(schemas) > 1:
                    yield ANYTHING
        named = schema.get("type")
        types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        chosen = any(name in schema for name in ("$ref", "const", "enum", "anyOf", "oneOf"))
        if not types and not chosen:
            yield ANYTHING
        for kind in _TYPES:
            meant = any(word in schema for word in _KEYWORDS.get(kind, ()))
            if meant or kind in types or (kind == "number" and "integer" in types):
                yield self._of_type(kind, schema)

    def _target(self, reference: Any) -> Forced:
        if not isinstance(reference, str) or not re.fullmatch(r"#(/[^~%]+)?", reference):
            return ENDLESS
        target = self._root
        for name in reference.split("/")[1:]:
            target = target.get(name) if isinstance(target, Mapping) else None
        return ENDLESS if target is None else self.read(target)

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> Forced:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return _string(schema)
        if kind == "number":
            return _number(schema)
        return Forced(0, 4, 4, None) if kind == "boolean" else _literal(4)

    def _array(self, schema: Mapping[str, Any]) -> Forced:
        items, least = schema.get("items"), _count(schema.get("minItems"))
        prefix = schema.get("prefixItems")
        first = [each for each in (prefix, items) if isinstance(each, list)]
        separator = _literal(2)
        parts = [_literal(2)]
        for index, item in enumerate(each for entries in first for each in entries):
            part = _then(self.read(item), separator)
            parts.append(part if index < least else _optional(part))
        rest = [schema[name] for name in ("items", "unevaluatedItems") if name in schema]
        rest = [item for item in rest if item is not False and not isinstance(item, list)]
        other = _then(_either(map(self.read, rest)) if rest else ANYTHING, separator)
        if least == 0 and rest and schema.get("maxItems") != 0:
            parts.append(CHOICE)  # between an item and the end
        if least > len(parts) - 1:
            parts.append(_repeated(other, least - len(parts) + 1))
        return _then(*parts, _optional(other), _literal(2))

    def _object(self, schema: Mapping[str, Any]) -> Forced:
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, Mapping) else {}
        required = required if isinstance(required, list) else []
        names = [each for each in required if isinstance(each, str)]
        least = _count(schema.get("minProperties"))
        others = [schema.get(name) for name in ("additionalProperties", "unevaluatedProperties")]
        others = [each for each in others if each is not None and each is not False]
        other = _either(map(self.read, others)) if others else ANYTHING
        members = {name: self._member(name, self.read(each)) for name, each in properties.items()}
        missing = {name: self._member(name, other) for name in names if name not in members}
        wanted = set(names)
        parts = [part if name in wanted else _optional(part) for name, part in members.items()]
        free = _then(_literal(1), CHOICE, self._frame, other)  # a member with a name of its choice
        if not wanted and least == 0 and (members or others):
            parts.insert(0, CHOICE)  # between a member and the end
        forms = [_then(*parts, *missing.values(), _optional(free))]
        if self._any_order:
            each = _either([*members.values(), *missing.values(), free])
            forms.append(_repeated(each, max(least, len(names))))
        if "propertyNames" in schema:
            name = self.read(schema["propertyNames"])
            forms.append(_repeated(_then(name, self._frame, other), least))
        patterns = schema.get("patternProperties")
        for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
            member = _then(_regex(pattern), self._frame, self.read(value))
            forms.append(_repeated(member, least))
        return _then(_literal(2), _either(forms), _literal(2))

    def _member(self, name: str, value: Forced) -> Forced:
        return _then(_literal(len(json.dumps(name))), self._frame, value)


def _string(schema: Mapping[str, Any]) -> Forced:
    quote = _literal(1)
    forms = []
    if "pattern" in schema:
        forms.append(_then(quote, _regex(schema["pattern"]), quote))
    if "format" in schema:
        forms.append(_literal(FORMAT))
    if not forms:
        empty = schema.get("maxLength") == 0
        forms.append(_then(quote, NOTHING if empty else CHOICE, quote))
    return _either(forms)


def _number(schema: Mapping[str, Any]) -> Forced:
    bounds = [schema[name] for name in _BOUNDS if name in schema]
    if not bounds:
        return CHOICE
    digits = sum(len(str(each)) if isinstance(each, int) else DIGITS for each in bounds)
    return _literal(digits + FRAME)


# -- structural tags ----------------------------------------------------------------------------


def _tag(tag: Any) -> Forced:
    """A structural tag, in its present form or the first one."""
    if not isinstance(tag, Mapping):
        return ENDLESS
    if "structures" not in tag:
        return _format(tag.get("format"), 0)
    structures = tag["structures"]
    if not isinstance(structures, list):
        return ENDLESS
    return _then(CHOICE, _either(_between(each, 0, "schema") for each in structures), CHOICE)


def _between(tag: Any, depth: int, content: str = "content") -> Forced:
    """A beginning, a content and an end."""
    if not isinstance(tag, Mapping):
        return ENDLESS
    value = tag.get(content)
    inside = _schema(value) if content == "schema" else _format(value, depth + 1)
    return _then(_texts(tag.get("begin")), inside, _texts(tag.get("end")))


def _texts(value: Any) -> Forced:
    """One of some texts; what is none, as a token, is endless: the matcher looks past tokens."""
    if isinstance(value, str):
        return _literal(len(value))
    return _either(map(_texts, value)) if isinstance(value, list) else ENDLESS


def _format(value: Any, depth: int) -> Forced:
    """One format of a structural tag (xgrammar/structural_tag.py). Formats of tokens, grammars, and
    what is unknown, are endless."""
    if not isinstance(value, Mapping) or depth >= MAX_DEPTH:
        return ENDLESS

    def listed(name: str) -> list[Forced]:
        entries = value.get(name)
        read = _between if name == "tags" else _format
        return [read(each, depth + 1) for each in entries] if isinstance(entries, list) else []

    def inner() -> Forced:
        return _format(value.get("content"), depth + 1)

    kind = value.get("type")
    if kind == "const_string":
        return _texts(value.get("value"))
    if kind in ("json_schema", "qwen_xml_parameter"):
        if value.get("excludes"):
            return ENDLESS  # they take values away, and choices with them
        plain = kind == "json_schema" and value.get("style", "json") == "json"
        frame = FRAME if plain else XML_FRAME
        any_order = value.get("any_order") is True
        return _schema(value.get("json_schema"), frame, any_order=any_order)
    if kind == "any_text":
        return _optional(CHOICE)
    if kind == "regex":
        return _regex(value.get("pattern"))
    if kind == "sequence":
        return _then(*listed("elements"))
    if kind == "or":
        return _either(listed("elements"))
    if kind == "tag":
        return _between(value, depth)
    if kind == "triggered_tags":
        return _optional(_then(_optional(_either(listed("tags"))), _optional(CHOICE)))
    if kind == "tags_with_separator":
        tag = _either(listed("tags"))
        return _optional(_then(tag, _optional(_then(_texts(value.get("separator")), tag))))
    if kind == "optional" or kind == "star":
        return _optional(inner())
    if kind == "plus":
        return inner()
    if kind == "repeat":
        return _repeated(inner(), value.get("min"))
    return ENDLESS
