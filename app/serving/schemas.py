"""JSON schemas of the request bodies: the request models with the tables of fields applied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from app.declaration.endpoint import Endpoint
from app.validation.fields import NotAt, OnlyAt, SameAs, WithoutEffect, json_type
from app.validation.speculation_field import FIELD

COMPONENTS = "#/components/schemas/"
_SPECULATION = {
    "type": "object",
    "properties": {
        "enabled": {"type": "boolean"},
        "max_k": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
        "tokens": {"type": ["boolean", "null"]},
    },
    "additionalProperties": False,
}

# The `tool_choice` of chats that vLLM's model does not have (app/validation/tools.py).
_ALLOWED_TOOLS = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}


def request_schemas(
    endpoints: Iterable[Endpoint],
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Schemas by the endpoint's name, and the definitions that they refer to under `COMPONENTS`."""
    found: dict[str, dict[str, Any]] = {}
    definitions: dict[str, Any] = {}
    for endpoint in endpoints:
        shapes = [_schema(model, endpoint, definitions) for model in endpoint.models()]
        found[endpoint.name] = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    return found, definitions


def _schema(
    model: type[BaseModel], endpoint: Endpoint, definitions: dict[str, Any]
) -> dict[str, Any]:
    # Models of different APIs have types of the same name.
    prefix = f"{endpoint.name}.{model.__name__}."
    schema = model.model_json_schema(ref_template=f"{COMPONENTS}{prefix}{{model}}")
    for name, definition in schema.pop("$defs", {}).items():
        definitions[prefix + name] = definition
    if endpoint.generates:
        schema["properties"][FIELD] = _SPECULATION
    if endpoint.tools is not None and endpoint.tools.allowed_in:
        schema["properties"]["tool_choice"]["anyOf"].append(_ALLOWED_TOOLS)
    for name in ("stop", "stop_sequences"):  # the server's own setting is the bound
        for form in schema["properties"].get(name, {}).get("anyOf", ()):
            form.pop("maxItems", None)
    for name, rule in endpoint.fields.items():
        if isinstance(rule, NotAt):
            if name in schema["properties"]:
                schema["properties"][name]["not"] = {"enum": [*rule.values]}
        elif (described := _described(rule)) is None:
            schema["properties"].pop(name, None)
        else:
            schema["properties"][name] = described
    return {**schema, "additionalProperties": False}  # unknown fields are refused


def _described(rule: OnlyAt | SameAs | WithoutEffect) -> dict[str, Any] | None:
    """A field's schema by its rule; None where every value is refused."""
    if isinstance(rule, OnlyAt):
        if not rule.values:
            return None
        return {"enum": [*rule.values, None], "description": f"Nothing else: {rule.why}."}
    effect = f"The same as {rule.name}" if isinstance(rule, SameAs) else "Without effect"
    return {"type": [json_type(rule.kind), "null"], "description": f"{effect}: {rule.why}."}
