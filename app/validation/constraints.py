"""Refuses schemas in a request that cannot be enforced. No vllm import.

A format is strict unless it says `strict: false`, a tool if it says `strict: true`. Any other
schema is enforced as far as the grammar backend can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from app.settings import LimitSettings
from app.validation.field_checks import invalid
from app.validation.json_schema import enforceable
from app.validation.size_limits import check_schema, count_prompts, decoded

# Takes a schema's place in the request and the schema; returns what replaces it.
_Change = Callable[[str, Any], Any]

# A place in the request, the schema there, and whether it has to be enforced as a whole.
_Held = tuple[str, Any, bool]

_AS_ENFORCED = ", written as it is enforced,"

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def check_schemas(payload: Mapping[str, Any], limits: LimitSettings) -> None:
    """Refuse keywords of strict schemas that would be ignored, and schemas whose enforceable form
    is larger than a schema may be. Raises ApiError naming the keyword or the schema."""
    prompts = count_prompts(payload)
    for place, schema, strict in _schemas(payload):
        written, unenforced = enforceable(schema)
        if strict and unenforced:
            where = f"{place}.{unenforced[0].place}"
            raise invalid(where, f"'{where}' cannot be enforced: {unenforced[0].why}.")
        check_schema(written, place, limits, prompts=prompts, form=_AS_ENFORCED)


def check_formats(payload: Mapping[str, Any]) -> None:
    """Refuse a format of JSON without its schema, and a second constraint beside a format.

    vLLM ignores the missing schema in Messages, and the second constraint where the first one is a
    schema; elsewhere it answers with an error about its own data structures.
    """
    for place, value in _formats(payload):
        kind = value.get("type", "json_schema" if place == "output_config.format" else None)
        if kind == "json_schema":
            _check_format(place, value)
        if kind not in (None, "text") and payload.get("structured_outputs") is not None:
            raise invalid(
                "structured_outputs",
                f"'{place}' and 'structured_outputs' both say what the answer must be: send one.",
            )


def place_of_format(payload: Mapping[str, Any]) -> str | None:
    """The field that holds a whole answer to JSON or to a list of texts, in which no call fits. A
    grammar of the client's own may have calls."""
    for place, value in _formats(payload):
        if value.get("type", "json_schema") in ("json_object", "json_schema"):
            return place
    given = payload.get("structured_outputs")
    if isinstance(given, dict) and any(given.get(key) for key in ("json", "json_object", "choice")):
        return "structured_outputs"
    return None


def has_strict_tool(payload: Mapping[str, Any]) -> bool:
    """Whether one of the tools says `strict: true`."""
    return any(strict for _, _, strict in _of_tools(payload.get("tools"), "tools"))


def _check_format(place: str, value: dict[str, Any]) -> None:
    """Raise ApiError for the first field of a format of JSON that is missing or of a wrong type."""
    if place == "response_format":
        value, place = _field(value, place, "json_schema", dict), f"{place}.json_schema"
    if not place.startswith("output"):  # Anthropic's have no name
        _field(value, place, "name", str)
    _field(value, place, "schema", dict)


def _field(value: dict[str, Any], place: str, name: str, kind: type) -> Any:
    where = f"{place}.{name}"
    if name not in value:
        raise invalid(where, f"Missing required parameter: '{where}'.", "missing_parameter")
    if not isinstance(value[name], kind):
        wanted = "an object" if kind is dict else "a string"
        raise invalid(where, f"Invalid type for '{where}': expected {wanted}.")
    return value[name]


def relax(constraint: Any) -> None:
    """Rewrite the schemas of vLLM's StructuredOutputsParams, in place, to be enforced."""
    if isinstance(constraint.json, dict):
        # As text: what carries it to the engine holds no integer of more than 64 bits.
        constraint.json = json.dumps(enforceable(constraint.json)[0])
    elif isinstance(constraint.json, str):
        constraint.json = _rewritten(constraint.json, lambda schema: enforceable(schema)[0])
    if constraint.structural_tag:
        constraint.structural_tag = _rewritten(
            constraint.structural_tag,
            lambda tag: _changed(tag, "", lambda _, schema: enforceable(schema)[0]),
        )


def name_parameters(payload: Mapping[str, Any]) -> None:
    """Give tools without parameters a schema that takes `{}`: without a schema any JSON passes,
    text and lists included."""
    for tool in _tools(payload.get("tools")):
        function = tool.get("function")
        if isinstance(function, dict):
            holder, name = function, "parameters"
        elif "input_schema" in tool:
            holder, name = tool, "input_schema"
        elif tool.get("type") == "function" and "name" in tool:
            holder, name = tool, "parameters"
        else:
            continue
        if holder.get(name) in (None, {}):
            holder[name] = {**NO_PARAMETERS, "properties": {}}


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            yield tool
            yield from _tools(tool.get("tools"))  # of a namespace


def _schemas(payload: Mapping[str, Any]) -> Iterator[_Held]:
    """Places and schemas of all that the output is held to, and whether each is strict."""
    for place, value in _formats(payload):
        yield from _of_format(value, place)
    given = payload.get("structured_outputs")
    if isinstance(given, dict):
        yield "structured_outputs.json", decoded(given.get("json")), True
        tag = decoded(given.get("structural_tag"))
        yield from _of_tag(tag, "structured_outputs.structural_tag")
    yield from _of_tools(payload.get("tools"), "tools")


def _formats(payload: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Places and values of the fields that say what form the answer has."""
    for name, inner in (
        ("response_format", None),
        ("text", "format"),
        ("output_config", "format"),
    ):
        value, place = payload.get(name), name
        if inner is not None:
            value, place = value.get(inner) if isinstance(value, dict) else None, f"{name}.{inner}"
        if isinstance(value, dict):
            yield place, value


def _of_format(value: dict[str, Any], place: str) -> Iterator[_Held]:
    if value.get("type") == "structural_tag":
        yield from _of_tag(value, place)
        return
    holder = value.get("json_schema")
    if isinstance(holder, dict) and value.get("type") == "json_schema":
        value, place = holder, f"{place}.json_schema"
    yield f"{place}.schema", value.get("schema"), value.get("strict") is not False


def _of_tools(tools: Any, place: str) -> Iterator[_Held]:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        where = f"{place}[{index}]"
        if not isinstance(tool, dict):
            continue
        function = tool.get("function")
        for holder, inside in ((tool, where), (function, f"{where}.function")):
            if isinstance(holder, dict):
                strict = holder.get("strict") is True
                for name in ("parameters", "input_schema"):
                    yield f"{inside}.{name}", holder.get(name), strict
        yield from _of_tools(tool.get("tools"), f"{where}.tools")


def _of_tag(tag: Any, place: str) -> Iterator[_Held]:
    found: list[_Held] = []

    def note(where: str, schema: Any) -> Any:
        found.append((where, schema, True))
        return schema

    _changed(tag, place, note)
    yield from found


def _changed(value: Any, place: str, change: _Change) -> Any:
    """A structural tag with its schemas changed: under `json_schema`, and under `schema` beside a
    `begin`, as its first form has them."""
    if isinstance(value, list):
        return [_changed(item, f"{place}[{index}]", change) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    return {
        name: change(f"{place}.{name}", item)
        if name == "json_schema" or (name == "schema" and "begin" in value)
        else _changed(item, f"{place}.{name}", change)
        for name, item in value.items()
    }


def _rewritten(text: str, change: Callable[[Any], Any]) -> str:
    value = decoded(text)
    return text if value is None else json.dumps(change(value))
