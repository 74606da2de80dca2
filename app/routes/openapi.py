"""The OpenAPI document at GET /openapi.json: request bodies and error envelopes.

app/http/body and app/declaration/request_checks.py check bodies, so FastAPI knows nothing of them.
The bodies' schemas come from the engine and are missing until it has been up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.declaration.answers import OPENAI
from app.declaration.endpoint import Endpoint, answers_for
from app.engine.supervisor import Engine
from app.routes import operations, speculation


def install(app: FastAPI, engine: Engine, endpoints: Sequence[Endpoint]) -> None:
    """Make the application serve the document that `build` makes."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = build(app, endpoints, *engine.schemas)
        if engine.schemas[0]:
            app.openapi_schema = document
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def build(
    app: FastAPI,
    endpoints: Sequence[Endpoint],
    schemas: dict[str, dict[str, Any]],
    definitions: dict[str, Any],
) -> dict[str, Any]:
    """The OpenAPI document. `schemas` are those of bodies, by endpoint, and refer to
    `definitions`."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # every refusal has our envelope
        components.pop(unused, None)
    formats = [OPENAI, *(endpoint.answers for endpoint in endpoints)]
    components |= {answers.error_name: answers.error_schema for answers in formats}
    components |= definitions
    bodies = {endpoint.path: schemas.get(endpoint.name) for endpoint in endpoints}
    invoked = [each.name for each in endpoints if each.invocation_field is not None]
    shapes = [schemas[name] for name in invoked if name in schemas]
    bodies[operations.INVOCATIONS] = {"anyOf": shapes} if shapes else None
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            route["responses"].pop("422", None)
            error = answers_for(path, endpoints).error_name
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
