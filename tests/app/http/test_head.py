"""HEAD answers as GET does, on every route and before there is a route."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from app.engine.supervisor import Phase
from app.main import create_app
from app.settings import load
from tests.app.keys_file import tenant
from tests.app.phased_engine import PhasedEngine

KEY = "sk-aerie-one"
VARIABLE = {"x-request-id", "date"}


def gateway(phase: Phase = Phase.READY, **given: str) -> Any:
    settings = load({"k": "0", **given}, {}, preset="embedded")
    engine = PhasedEngine(settings)
    engine.phase = phase
    engine._back_at = time.monotonic() + 1e6  # two answers tell the same seconds to wait
    return create_app(settings, engine)


def get_paths() -> list[str]:
    paths = {
        route.path.replace("{model:path}", "aerie-embedded")
        for route in gateway().routes
        if isinstance(route, APIRoute | Route) and "GET" in (route.methods or ())
    }
    return sorted(paths)


def answer(app: Any, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body as the application sends them: a server may drop a body later."""

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, headers=headers)

    response = asyncio.run(request())
    fixed = {name: value for name, value in response.headers.items() if name not in VARIABLE}
    return response.status_code, fixed, response.content


def test_the_routes_are_all_there() -> None:
    assert {"/livez", "/readyz", "/health", "/ping", "/metrics", "/v1/models"} <= set(get_paths())


@pytest.mark.parametrize("phase", [Phase.READY, Phase.LOADING])
@pytest.mark.parametrize("path", [*get_paths(), "/nope", "/v1/models/nope"])
def test_head_has_the_status_and_headers_of_get(path: str, phase: Phase) -> None:
    app = gateway(phase)
    status, headers, _ = answer(app, "GET", path)
    head_status, head_headers, head_body = answer(app, "HEAD", path)
    assert head_status == status
    assert head_body == b""
    if path != "/metrics":  # its figures change with every request, and its length with them
        assert head_headers == headers


def test_head_needs_the_key_that_get_needs() -> None:
    app = gateway(keys=tenant("one", KEY))
    assert answer(app, "HEAD", "/livez")[0] == 200
    assert answer(app, "HEAD", "/health")[0] == 200
    status, _, body = answer(app, "HEAD", "/v1/models")
    assert (status, body) == (401, b"")
    assert answer(app, "HEAD", "/v1/models", authorization=f"Bearer {KEY}")[0] == 200


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/health"])
def test_a_refused_method_is_told_of_head(path: str) -> None:
    status, headers, _ = answer(gateway(), "DELETE", path)
    assert status == 405
    assert headers["allow"] == "GET, HEAD"


def test_head_runs_no_post_route() -> None:
    status, headers, body = answer(gateway(), "HEAD", "/v1/chat/completions")
    assert (status, headers["allow"], body) == (405, "POST", b"")
