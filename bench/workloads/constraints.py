"""Constraints of answers, such as a JSON schema: fields of a request beside its prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.workloads.prompt import Prompt


def json_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The request field that holds an answer to a JSON schema, called `name`."""
    wanted = {"name": name, "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


# Any prompt can be answered in this schema. Its list is short, so that the texts end an answer.
_TEXT = {"type": "string"}
_SCHEMA = {
    "type": "object",
    "properties": {
        "title": _TEXT,
        "answer": _TEXT,
        "steps": {"type": "array", "items": _TEXT, "maxItems": 4},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["title", "answer", "steps", "confidence"],
    "additionalProperties": False,
}
_TOOL = {"name": "reply", "description": "Reply to the user.", "parameters": _SCHEMA}
NAMED: dict[str, dict[str, Any]] = {
    "json-schema": json_schema("reply", _SCHEMA),
    # The server needs a --tool-call-parser.
    "tools": {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
}


def constrained(prompts: Iterable[Prompt], name: str) -> list[Prompt]:
    """The prompts with the request fields of the constraint `name` too. Raises ValueError as
    `load_constraint`."""
    fields = load_constraint(name)
    return [replace(prompt, extra_body={**prompt.extra_body, **fields}) for prompt in prompts]


def load_constraint(name: str) -> dict[str, Any]:
    """The request fields of the constraint `name`, or of the JSON object in a file of that name;
    none for "". Raises ValueError if it is neither."""
    if not name or name in NAMED:
        return NAMED.get(name, {})
    try:
        fields = json.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        names = ", ".join(NAMED)
        raise ValueError(f"--constraint {name}: not {names} or a JSON file: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--constraint {name}: must hold an object, fields of a request")
    return fields
