"""Refuses unknown fields inside of a request's objects, as those at its top are refused.

The known ones are read from the types of vLLM's request models. In a union, classes that the
value's own `type` and `role` contradict do not count. No vllm import.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel

from app.validation.field_checks import invalid

_TAGS = ("type", "role")
_WRAPPERS = (Annotated, Required, NotRequired)
# Fields in the objects of a chat on which no answer depends: hints for a cache, and what other
# servers and clients' own classes add to earlier messages.
CHAT_MEMBERS = frozenset(
    {
        *("annotations", "parsed", "parsed_arguments", "phase", "provider_specific_fields"),
        *("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks"),
        *("cache_control", "citations", "extra_content", "include_obfuscation", "index"),
    }
)


@dataclass(frozen=True)
class _Shape:
    """The objects that a value may be (`classes`) or hold as a list (`items`). An open one may be
    anything."""

    is_open: bool = False
    classes: tuple[type, ...] = ()
    items: _Shape | None = None

    def __or__(self, other: _Shape) -> _Shape:
        items = self.items or other.items
        if self.items and other.items:
            items = self.items | other.items
        classes = tuple(dict.fromkeys(self.classes + other.classes))
        return _Shape(self.is_open or other.is_open, classes, items)


def check_nested(
    payload: Mapping[str, Any], model: type[BaseModel], ignored: Set[str] = frozenset()
) -> None:
    """Raise ApiError for the first unknown field inside of a known one, except for `ignored` ones.

    Goes breadth first rather than by recursion: the depth is the client's choice.
    """
    known = _fields_of(model)
    waiting = deque((name, payload[name], known[name]) for name in payload if name in known)
    while waiting:
        path, value, shape = waiting.popleft()
        if shape.is_open:
            continue
        if isinstance(value, list) and shape.items is not None:
            items = shape.items
            waiting.extend((f"{path}[{i}]", item, items) for i, item in enumerate(value))
        elif isinstance(value, dict):
            classes = tuple(cls for cls in shape.classes if _may_be(value, cls))
            inside = _fields_of_any(classes)
            for name, item in value.items():
                if name in inside:
                    if isinstance(item, dict | list):
                        waiting.append((f"{path}.{name}", item, inside[name]))
                elif classes and name not in ignored:
                    where = f"{path}.{name}"
                    raise invalid(
                        where,
                        f"Unrecognized request argument supplied: {where}",
                        "unknown_parameter",
                    )


def _merged(shapes: Sequence[_Shape]) -> _Shape:
    first = shapes[0]
    for other in shapes[1:]:
        if other is not first:
            first |= other
    return first


def _may_be(value: Mapping[str, Any], cls: type) -> bool:
    """Whether no tag of the value (`type`, `role`) contradicts the class."""
    for name, values in _tags_of(cls).items():
        given = value.get(name)
        if given is not None and (not isinstance(given, str) or given not in values):
            return False
    return True


@cache
def _annotations(cls: type) -> dict[str, Any]:
    if issubclass(cls, BaseModel):
        found: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            found[name] = field.annotation
            if field.alias:
                found[field.alias] = field.annotation
        return found
    hints = get_type_hints(cls, include_extras=True)
    if is_dataclass(cls):
        return {each.name: hints[each.name] for each in fields(cls) if each.name[0] != "_"}
    return hints


@cache
def _fields_of(cls: type) -> dict[str, _Shape]:
    return {name: _shape(annotation) for name, annotation in _annotations(cls).items()}


@cache  # as many entries as there are sets of classes that share their tags
def _fields_of_any(classes: tuple[type, ...]) -> dict[str, _Shape]:
    found: dict[str, _Shape] = {}
    for cls in classes:
        for name, shape in _fields_of(cls).items():
            found[name] = found[name] | shape if name in found else shape
    return found


@cache
def _tags_of(cls: type) -> dict[str, frozenset[Any]]:
    return {
        name: values
        for name, annotation in _annotations(cls).items()
        if name in _TAGS and (values := _literals(annotation))
    }


def _literals(annotation: Any) -> frozenset[Any]:
    """The values of a Literal, or of a union of them and None; none if it may be anything."""
    annotation = _bare(annotation)
    origin = get_origin(annotation)
    if origin is Literal:
        return frozenset(get_args(annotation))
    if origin in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        values = [_literals(part) for part in parts]
        return frozenset().union(*values) if all(values) else frozenset()
    return frozenset()


def _bare(annotation: Any) -> Any:
    while True:
        if hasattr(annotation, "__value__"):  # an alias that a `type` statement made
            annotation = annotation.__value__
        elif get_origin(annotation) in _WRAPPERS:
            annotation = get_args(annotation)[0]
        else:
            return annotation


def _shape(annotation: Any) -> _Shape:
    annotation = _bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _merged([_shape(part) for part in arguments])
    if annotation is Any or annotation is object:
        return _Shape(is_open=True)
    kind = origin or annotation
    if _is_typed_dict(annotation) or is_dataclass(annotation) or _is_subclass(kind, BaseModel):
        return _Shape(classes=(annotation,))
    if _is_subclass(kind, Mapping):
        return _Shape(is_open=True)
    if _is_subclass(kind, Iterable) and not _is_subclass(kind, str | bytes):
        return _Shape(items=_shape(arguments[0]) if arguments else _Shape(is_open=True))
    return _Shape()


def _is_typed_dict(cls: Any) -> bool:
    """Whether `cls` is a TypedDict of `typing` or of `typing_extensions`, which do not know each
    other's."""
    return _is_subclass(cls, dict) and hasattr(cls, "__total__")


def _is_subclass(cls: Any, kind: Any) -> bool:
    """`issubclass`, also for what may be no class."""
    return isinstance(cls, type) and issubclass(cls, kind)
