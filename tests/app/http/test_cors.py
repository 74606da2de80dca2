"""CORS: what a web page's script may do with the gateway, and read of its answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.engine.supervisor import Phase
from app.errors import SettingsError
from app.http.cors import EXPOSED_HEADERS, METHODS
from app.main import create_app
from app.settings import load
from tests.app.keys_file import tenant
from tests.app.phased_engine import PhasedEngine

KEY = "sk-aerie-one"
KEYS = tenant("one", KEY, "requests_per_minute = 1")
PAGE, OTHER_PAGE = "http://localhost:3000", "https://elsewhere.example"
PATH = "/v1/chat/completions"
TOLD = ("x-aerie-speculation", "server-timing")
HEADERS = "authorization,content-type,x-stainless-lang"


class FakeEngine(PhasedEngine):
    """An engine that is ready, and each of whose operations is a defect."""

    def operation(self, name: str) -> Any:
        return None


def run(check: Callable[[httpx.AsyncClient], Any], **given: str) -> None:
    settings = load({"k": "0", **given}, {}, preset="embedded")
    engine = FakeEngine(settings)
    engine.phase = Phase.READY
    app = create_app(settings, engine)

    async def scenario() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await check(client)

    asyncio.run(scenario())


async def preflight(
    client: httpx.AsyncClient, origin: str = PAGE, method: str = "POST", path: str = PATH
) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": HEADERS,
    }
    return await client.options(path, headers=headers)


def readable(response: httpx.Response, origin: str = PAGE) -> bool:
    """Whether a browser hands the answer to the page's script."""
    return response.headers.get("access-control-allow-origin") in (origin, "*")


def test_it_is_off_by_default() -> None:
    async def check(client: httpx.AsyncClient) -> None:
        assert (await preflight(client)).status_code == 405
        response = await client.get("/v1/models", headers={"origin": PAGE})
        assert not [name for name in response.headers if name.startswith("access-control")]

    run(check)


@pytest.mark.parametrize("origins", [PAGE, f"https://a.example, {PAGE.upper()}", "*"])
@pytest.mark.parametrize("path", [PATH, "/v1/models", "/livez", "/nope"])
def test_a_preflight_needs_no_key(origins: str, path: str) -> None:
    async def check(client: httpx.AsyncClient) -> None:
        response = await preflight(client, path=path)
        assert response.status_code == 200
        assert readable(response)
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == HEADERS
        assert "access-control-allow-credentials" not in response.headers

    run(check, allowed_origins=origins, keys=KEYS)


def test_a_page_may_forget_a_response() -> None:
    async def check(client: httpx.AsyncClient) -> None:
        response = await preflight(client, method="DELETE", path="/v1/responses/resp_1")
        assert response.status_code == 200
        assert readable(response)

    run(check, allowed_origins=PAGE)


@pytest.mark.parametrize(
    ("origin", "method"),
    [
        (OTHER_PAGE, "POST"),
        ("http://localhost", "POST"),
        ("http://localhost:30000", "POST"),
        ("https://localhost:3000", "POST"),
        ("null", "POST"),
        (PAGE, "PATCH"),
        (PAGE, "PUT"),
    ],
)
def test_other_pages_and_other_methods_are_refused(origin: str, method: str) -> None:
    async def check(client: httpx.AsyncClient) -> None:
        assert (await preflight(client, origin, method)).status_code == 400
        if method == "POST":
            response = await client.get("/v1/models", headers={"origin": origin})
            assert not readable(response, origin)

    run(check, allowed_origins=PAGE)


def test_an_options_request_that_is_no_preflight_needs_a_key() -> None:
    async def check(client: httpx.AsyncClient) -> None:
        assert (await client.options(PATH)).status_code == 401
        assert (await client.options(PATH, headers={"origin": PAGE})).status_code == 401
        method = {"access-control-request-method": "POST"}
        assert (await client.options(PATH, headers=method)).status_code == 401

    run(check, allowed_origins="*", keys=KEYS)


@pytest.mark.parametrize("origins", [PAGE, "*"])
def test_a_script_can_read_every_refusal(origins: str) -> None:
    async def check(client: httpx.AsyncClient) -> None:
        async def post(content: bytes = b"{}", key: str = KEY, path: str = PATH) -> httpx.Response:
            headers = {
                "origin": PAGE,
                "authorization": f"Bearer {key}",
                "content-type": "application/json",
            }
            return await client.post(path, content=content, headers=headers)

        responses = {
            401: await post(key="wrong"),
            413: await post(b" " * 2000),
            429: await post(),
            404: await post(path="/nope"),
            405: await post(path="/livez"),
        }
        for status, response in responses.items():
            assert response.status_code == status
            assert readable(response), status
            exposed = response.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "retry-after", *TOLD} <= set(exposed)
        assert responses[429].headers["retry-after"]

    run(check, allowed_origins=origins, keys=KEYS, max_body_mib="0.001")


def test_a_script_can_read_of_a_defect() -> None:
    """Starlette answers a 500 from outside of every middleware of the application."""

    async def check(client: httpx.AsyncClient) -> None:
        response = await client.post(PATH, json={}, headers={"origin": PAGE})
        assert response.status_code == 500
        assert readable(response)
        assert response.headers["x-request-id"]

    run(check, allowed_origins=PAGE)


def test_the_documentation_has_the_methods_and_the_headers() -> None:
    page = (Path(__file__).parents[3] / "docs/security.md").read_text("utf-8")
    methods = re.search(r"\| what a listed page may do \| (.*?) with any header", page)
    headers = re.search(r"\| what it may read \| .* the headers (.*) \|", page)
    assert methods and headers
    assert set(re.findall("`(.+?)`", methods[1])) == set(METHODS)
    names = set(re.findall("`(.+?)`", headers[1])) - {"x-ratelimit-*"}
    assert names == {name for name in EXPOSED_HEADERS if not name.startswith("x-ratelimit-")}


def test_answers_say_that_they_depend_on_the_origin() -> None:
    async def check(client: httpx.AsyncClient) -> None:
        for origin in ({}, {"origin": PAGE}, {"origin": OTHER_PAGE}):
            response = await client.get("/v1/models", headers=origin)
            assert response.status_code == 200
            assert "Origin" in response.headers["vary"]

    run(check, allowed_origins=PAGE)


@pytest.mark.parametrize(
    "origins",
    ["localhost:3000", "http://localhost:3000/", "http://a.example/path", "null", "http://", "a b"],
)
def test_what_is_no_origin_ends_the_start(origins: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({"allowed_origins": f"{PAGE},{origins}"}, {})
    assert caught.value.key == "server.allowed_origins"
    assert origins in str(caught.value)


def test_other_schemes_than_http_have_origins_too() -> None:
    given = "tauri://localhost,app://obsidian.md,chrome-extension://abcdef"
    settings = load({"allowed_origins": given}, {})
    assert settings.server.origins == tuple(given.split(","))


@pytest.mark.parametrize(("keys", "warned"), [("", True), (KEYS, False)])
def test_every_page_without_keys_is_warned_of(
    keys: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"keys": keys} if keys else {}
    settings = load({"k": "0", "allowed_origins": "*", **given}, {}, preset="embedded")
    create_app(settings, FakeEngine(settings))
    assert ("any web page" in caplog.text) is warned
