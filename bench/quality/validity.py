"""Whether an answer keeps to what its request demands: a JSON schema, or a call of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from bench.load.events import AnswerMessage

VALID, CUT_OFF = "valid", "cut off"


def verdict(demands: Mapping[str, Any], message: AnswerMessage) -> str:
    """VALID, CUT_OFF if the answer reached its token limit, or what is wrong with it. `demands` are
    fields of the request; without a schema and tools every answer that ends is valid."""
    if message.finish_reason == "length":
        return CUT_OFF
    if tools := demands.get("tools"):
        return _calls(tools, demands.get("tool_choice"), message)
    form = demands.get("response_format") or {}
    if form.get("type") == "json_schema":
        return _json(form["json_schema"]["schema"], message.text)
    return VALID


def _calls(tools: list[dict[str, Any]], choice: Any, message: AnswerMessage) -> str:
    """VALID if every call is of a tool that may be called, with arguments that it takes."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if isinstance(choice, dict):
        chosen = choice["function"]["name"]
        schemas = {chosen: schemas[chosen]}
    if not message.calls and choice not in (None, "auto", "none"):
        return "no call"
    for name, arguments in message.calls:
        if name not in schemas:
            return f"call of {name!r}"
        found = _json(schemas[name], arguments)
        if found != VALID:
            return f"{name}: {found}"
    return VALID


def _json(schema: dict[str, Any], text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    problem = next(iter(Draft202012Validator(schema).iter_errors(value)), None)
    return VALID if problem is None else f"{problem.json_path}: {problem.message[:200]}"
