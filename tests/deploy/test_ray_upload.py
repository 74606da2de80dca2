"""How a replica behind Ray Serve hands a request's body to its gateway: without Ray, of which
`deploy.ray.app` needs nothing for that."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.requests import Request

PARTS = [b'{"prompt": ', b'"x"}']
LENGTH = (b"content-length", str(sum(map(len, PARTS))).encode())
CHUNKED = (b"transfer-encoding", b"chunked")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    ray = ModuleType("ray")
    ray.serve = ModuleType("ray.serve")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delitem(sys.modules, "deploy.ray.app", raising=False)
    yield importlib.import_module("deploy.ray.app")
    sys.modules.pop("deploy.ray.app", None)


class Client:
    """A client that sends these parts of a body, and then nothing more."""

    def __init__(self, *headers: tuple[bytes, bytes], parts: list[bytes]) -> None:
        self.headers, self.parts, self.sent = list(headers), parts, 0

    async def receive(self) -> dict[str, Any]:
        if self.sent == len(self.parts):
            await asyncio.sleep(60)
        self.sent += 1
        more = self.sent < len(PARTS)
        return {"type": "http.request", "body": self.parts[self.sent - 1], "more_body": more}

    def request(self) -> Request:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": self.headers,
        }  # fmt: skip
        return Request(scope, self.receive)


class Listening(httpx.AsyncBaseTransport):
    """A gateway that takes as many parts of a body as it wants, and answers."""

    def __init__(self, client: Client, parts: int) -> None:
        self.client, self.parts = client, parts
        self.seen: list[tuple[bytes, int]] = []  # each part, and how many the client had sent
        self.headers = httpx.Headers()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.headers = request.headers
        assert isinstance(request.stream, httpx.AsyncByteStream)
        async for part in request.stream:
            if part:
                self.seen.append((part, self.client.sent))
            if len(self.seen) == self.parts:
                break
        return httpx.Response(413)


def answered(app: ModuleType, client: Client, gateway: Listening, body_s: float = 30) -> Any:
    async def scenario() -> Any:
        replica = app.Gateway.__new__(app.Gateway)
        replica._arguments = app.Arguments(body_s=body_s)
        replica._stopping = False
        replica._client = httpx.AsyncClient(base_url="http://gateway", transport=gateway)
        return await asyncio.wait_for(replica(client.request()), 20)

    return asyncio.run(scenario())


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED])
def test_a_body_is_handed_on_as_it_comes(app: ModuleType, framing: tuple[bytes, bytes]) -> None:
    """A replica collected it first, however long it was, and the gateway's limits came too late."""
    client = Client(framing, parts=PARTS)
    gateway = Listening(client, parts=2)
    answered(app, client, gateway)
    assert gateway.seen == [(PARTS[0], 1), (PARTS[1], 2)]
    name, value = (text.decode() for text in framing)
    assert gateway.headers[name] == value
    assert ("content-length" in gateway.headers) != ("transfer-encoding" in gateway.headers)


def test_a_refused_body_is_not_read_to_its_end(app: ModuleType) -> None:
    client = Client(CHUNKED, parts=PARTS)
    assert answered(app, client, Listening(client, parts=1)).status_code == 413
    assert client.sent == 1


def test_a_body_that_does_not_come_is_given_up(app: ModuleType) -> None:
    client = Client(LENGTH, parts=PARTS[:1])
    response = answered(app, client, Listening(client, parts=2), body_s=0.2)
    assert response.status_code == 408
    assert json.loads(response.body)["error"]["type"] == "invalid_request_error"
    assert app.Arguments(body_s=7).line(1)[-2:] == ["--body-timeout-s", "7.0"]


def test_a_request_without_a_body_has_none(app: ModuleType) -> None:
    client = Client(parts=[])
    gateway = Listening(client, parts=1)
    answered(app, client, gateway)
    assert gateway.seen == []
    assert gateway.headers["content-length"] == "0"
