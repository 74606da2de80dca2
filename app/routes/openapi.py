"""The OpenAPI document at GET /openapi.json: request bodies and error envelopes.

app/http/body and app/serving/request_validation.py check bodies, so that FastAPI knows nothing of
them. Their schemas come from the engine and are missing until it has been up once.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.engine.supervisor import Engine
from app.routes import operations, speculation

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


def install(app: FastAPI, engine: Engine) -> None:
    """Make the application serve this document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = build(app, *engine.schemas)
        if engine.schemas[0]:
            app.openapi_schema = document
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def build(
    app: FastAPI, schemas: dict[str, dict[str, Any]], definitions: dict[str, Any]
) -> dict[str, Any]:
    """The OpenAPI document, with `schemas` by operation and the `definitions` they refer to."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # every refusal has our envelope
        components.pop(unused, None)
    components |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, **definitions}
    bodies = {path: schemas.get(name) for path, name in operations.OPERATIONS.items()}
    shapes = [schemas[name] for name in ("chat", "completions", "responses") if name in schemas]
    bodies["/invocations"] = {"anyOf": shapes} if shapes else None
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            route["responses"].pop("422", None)
            error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
            route["responses"]["default"] = {
                "description": "Refused or failed",
                "content": _json({"$ref": f"#/components/schemas/{error}"}),
            }
            if method == "post" and bodies.get(path):
                route["requestBody"] = {"required": True, "content": _json(bodies[path])}
    document["paths"][speculation.PATH]["patch"]["requestBody"] = {
        "required": True,
        "content": _json(
            {**speculation.Changes.model_json_schema(), "additionalProperties": False}
        ),
    }
    return document


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
