"""Paths that are almost right: a redirect, or a 404 that names them; and prefixes of proxies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.fake_engine import client
from tests.app.keys_file import tenant

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "fake", "messages": MESSAGES, "max_tokens": 4}
KEYS = tenant("one", "secret", "requests_per_minute = 2")
WEBSOCKET = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[TestClient]:
    with client(served_model_name='["fake", "org/other"]') as running:
        yield running


def error(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return str(body["message"])


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/models/", "/v1/models"),
        ("/v1/models//", "/v1/models"),
        ("/v1//models", "/v1/models"),
        ("//v1/models", "/v1/models"),
        ("/v1/models/fake/", "/v1/models/fake"),
        ("/v1/models//org/other", "/v1/models/org/other"),
        ("/v1/models/%2F", "/v1/models"),
        ("/version/?a=b%20c&d", "/version?a=b%20c&d"),
        ("///readyz//", "/readyz"),
    ],
)
def test_extra_slashes_lead_to_the_path_that_was_meant(
    gateway: TestClient, path: str, place: str
) -> None:
    response = gateway.request("GET", f"http://testserver{path}", follow_redirects=False)
    assert error(response, 307).endswith(f" Use {place.partition('?')[0]}.")
    assert response.headers["location"] == place
    assert gateway.get(response.headers["location"]).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("GET", "/v1/v1/models", " Did you mean /v1/models?"),
        ("POST", "/v1/v1/v1/chat/completions", " Did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1//chat/completions/", " Did you mean /v1/chat/completions?"),
        ("POST", "/chat/completions", " Did you mean /v1/chat/completions?"),
        ("GET", "/models/", " Did you mean /v1/models?"),
        ("GET", "/nonsense/", ""),
        ("GET", "/v1", ""),
        ("GET", "//evil.example/", ""),
    ],
)
def test_other_paths_get_a_404_that_names_them(
    gateway: TestClient, method: str, path: str, hint: str
) -> None:
    response = gateway.request(method, f"http://testserver{path}", follow_redirects=False)
    assert error(response, 404) == f"Unknown request URL: {method} {path}.{hint}"


def test_no_model_has_an_empty_name(gateway: TestClient) -> None:
    assert "``" not in gateway.get("/v1/models/", follow_redirects=False).text
    assert error(gateway.get("/v1/models/none"), 404) == "The model `none` does not exist."


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1//chat/completions"])
def test_a_body_is_sent_again(gateway: TestClient, path: str) -> None:
    response = gateway.post(f"http://testserver{path}", json=CHAT)
    assert response.status_code == 200, response.text
    assert response.history[0].status_code == 307
    assert response.json()["usage"]["completion_tokens"] == 4


def test_every_name_of_the_model_is_served(gateway: TestClient) -> None:
    """As in vLLM: requests may name any, and answers have the first."""
    cards = gateway.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["fake", "org/other"]
    assert gateway.get("/v1/models/org/other").json() == cards[1]
    text = {"model": "org/other", "prompt": "Hi", "max_tokens": 2}
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "model": "org/other"}),
        ("/v1/completions", text),
        ("/v1/responses", {"model": "org/other", "input": "Hi", "max_output_tokens": 16}),
        ("/v1/messages", {**CHAT, "model": "org/other"}),
    ):
        response = gateway.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "fake"
    message = error(gateway.post("/v1/chat/completions", json={**CHAT, "model": "third"}), 404)
    assert "third" in message


def test_redirects_lead_past_no_key_and_no_quota() -> None:
    slashed = "http://testserver//v1//chat/completions/"
    key = {"authorization": "Bearer secret"}
    with client(keys=KEYS) as gateway:
        assert error(gateway.post(slashed, json=CHAT), 401)
        assert error(gateway.get("/v1/models/", follow_redirects=False), 401)
        statuses = [gateway.post(slashed, json=CHAT, headers=key).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
def test_a_websocket_handshake_falls_back_at_once(gateway: TestClient, path: str) -> None:
    """Codex, for one, tries /v1/responses so, and takes HTTP after a 426."""
    response = gateway.get(path, headers=WEBSOCKET)
    assert response.status_code == 426
    assert response.headers["upgrade"] == "HTTP/1.1"  # RFC 9110, section 15.5.22
    assert "POST to it over HTTP" in response.text
    assert path in response.text


def test_other_paths_ignore_a_websocket_handshake(gateway: TestClient) -> None:
    assert gateway.get("/v1/models", headers=WEBSOCKET).status_code == 200
    assert gateway.get("/v1/realtime", headers=WEBSOCKET).status_code == 404
    assert gateway.post("/v1/chat/completions", headers=WEBSOCKET, json=CHAT).status_code == 200
    assert gateway.get("/v1/responses", headers={"upgrade": "h2c"}).status_code == 405


@pytest.mark.parametrize("prefix", ["/llm", "/a/b"])
def test_a_prefix_may_be_left_on_or_taken_off(prefix: str) -> None:
    gateway = client(root_path=f"{prefix}/", keys=KEYS)
    key = {"authorization": "Bearer secret"}
    for path in ("/v1/models", f"{prefix}/v1/models", f"{prefix}{prefix}/v1/models"):
        assert gateway.get(path).status_code == 401
        assert gateway.get(path, headers=key).status_code == 200, path
    assert gateway.get(f"{prefix}/livez").status_code == 200  # public under every spelling
    assert gateway.get("/livez").status_code == 200
    assert gateway.get(f"{prefix}x/v1/models", headers=key).status_code == 404
    document = gateway.get("/openapi.json", headers=key).json()
    assert document["servers"] == [{"url": prefix}]
    assert f"url: '{prefix}/openapi.json'" in gateway.get("/docs", headers=key).text
    moved = gateway.get("/v1/models/", headers=key, follow_redirects=False)
    assert moved.headers["location"] == f"{prefix}/v1/models"


def test_a_prefix_leads_past_no_quota() -> None:
    """Limits count by path, and so does the router: both must see the same one."""
    for path in ("/llm/v1/chat/completions", "/llm/llm/v1/chat/completions"):
        key = {"authorization": "Bearer secret"}
        with client(root_path="/llm", keys=KEYS) as gateway:
            statuses = [gateway.post(path, json=CHAT, headers=key).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
