"""The OpenAPI document says what the routes take."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.endpoints import declared
from app.engine.supervisor import Engine
from app.main import create_app
from app.routes.operations import metered_paths
from app.settings import load


def document(schemas: Any = None) -> dict[str, Any]:
    settings = load({}, {})
    engine = Engine(settings)
    if schemas is not None:
        engine.schemas = schemas
    # Without its lifespan: nothing starts.
    found: dict[str, Any] = TestClient(create_app(settings, engine)).get("/openapi.json").json()
    return found


def test_before_the_engine_was_up_bodies_are_missing_and_the_rest_is_not() -> None:
    found = document()
    assert "requestBody" not in found["paths"]["/v1/completions"]["post"]
    assert "requestBody" in found["paths"]["/v1/speculation"]["patch"]
    refused = found["paths"]["/v1/models/{model}"]["get"]["responses"]
    assert "422" not in refused
    assert refused["default"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error")


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    from app.serving.schemas import request_schemas

    return document(request_schemas(declared()))


def test_every_route_that_takes_a_body_describes_it(whole: dict[str, Any]) -> None:
    for path in metered_paths(declared()):
        content = whole["paths"][path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        assert schema.get("properties") or schema.get("anyOf"), path
    chat = whole["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    fields = chat["application/json"]["schema"]["properties"]
    assert {"messages", "tools", "max_completion_tokens", "speculation"} <= set(fields)
    assert chat["application/json"]["schema"]["additionalProperties"] is False


def test_every_reference_leads_somewhere(whole: dict[str, Any]) -> None:
    known = whole["components"]["schemas"]
    wanted = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(whole)))
    assert wanted <= set(known)
    assert len(wanted) > 50
