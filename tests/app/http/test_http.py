"""The HTTP side without an engine: readiness, envelopes, bodies, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from app.engine.supervisor import Phase
from app.main import create_app
from app.settings import load
from tests.app.http.fake_operation import PATH, FakeEngine, scope_of_post
from tests.waiting import IN_TIME_S, let_pass

SETTINGS = load({"max_body_mib": "0.01", "sse_keep_alive_s": "0.2"}, {}, preset="embedded")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def make() -> tuple[TestClient, FakeEngine]:
    engine = FakeEngine(SETTINGS)
    return TestClient(create_app(SETTINGS, engine), raise_server_exceptions=False), engine


@pytest.fixture
def client() -> Iterator[TestClient]:
    with make()[0] as client:
        yield client


def test_starting_is_alive_but_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "retry_after_s", 7)  # no second passes between the answers
    client, engine = make()
    with client:
        engine.phase = Phase.LOADING
        assert client.get("/livez").status_code == 200
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["phase"]) == (503, "loading")
        assert client.get("/ping").status_code == 503
        health = client.get("/health")
        assert (health.status_code, health.json()) == (503, ready.json())
        assert health.headers["retry-after"] == ready.headers["retry-after"]
        refused = client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "engine_not_ready"
        model = client.get("/v1/models").json()["data"][0]["id"]
        assert f'aerie_model_info{{model_name="{model}"}} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize("path", [PATH, "/invocations"])
def test_a_large_body_is_not_judged_before_its_limits_are_known(path: str) -> None:
    """Catches: a final 413 or 400 for a body that the model's context has room for."""
    client, engine = make()
    with client:
        engine.phase = Phase.LOADING
        for prompt in ("x" * 20_000, [1] * 70_000):
            refused = client.post(path, json={"prompt": prompt})
            assert refused.json()["error"]["code"] == "engine_not_ready"
            assert refused.headers["retry-after"]


def test_ready(client: TestClient) -> None:
    assert client.get("/readyz").status_code == 200
    assert client.get("/health").status_code == 200
    assert client.post("/ping").status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT).json() == {"ok": True}


POSTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"),
    "/invocations",
)
GETS = ("/v1/models", "/v1/models/aerie-embedded", "/metrics", "/livez", "/readyz", "/version")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *((method, path, 405) for method in ("GET", "PUT", "DELETE", "PATCH") for path in POSTS),
        *((method, path, 405) for method in ("POST", "DELETE") for path in GETS),
        *(("GET", path, 404) for path in ("/nope", "/v1/chat", "/v2/models", "/V1/MODELS")),
        ("POST", "/v1/chat/completions/extra", 404),
    ],
)
def test_router_errors_wear_the_envelope(
    client: TestClient, method: str, path: str, status: int
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert status == 404 or ("POST" if path in POSTS else "GET") in response.headers["allow"]
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/speculation", "GET, HEAD, PATCH"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("DELETE", "/ping", "GET, HEAD, POST"),
    ],
)
def test_a_path_with_several_routes_names_the_methods_of_all(
    client: TestClient, method: str, path: str, allowed: str
) -> None:
    assert client.request(method, path).headers["allow"] == allowed


def post(client: TestClient, content: bytes, kind: str = "application/json") -> httpx.Response:
    return client.post(PATH, content=content, headers={"content-type": kind})


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b" \n", "application/json", 400),
        (b"hello there", "application/json", 400),
        (b"{'model': 'x'}", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'"hello"', "application/json", 400),
        (b"5", "application/json", 400),
        (b"null", "application/json", 400),
        (b"{} {}", "application/json", 400),
        (b'{"model": "x",}', "application/json", 400),
        (b'{"a": NaN}', "application/json", 400),
        (b'{"a": "\xff"}', "application/json", 400),
        (b'{"a": "\xc0\xaf"}', "application/json", 400),
        ('{"model": "x"}'.encode("utf-16"), "application/json", 400),
        (b"model=x&messages=y", "application/json", 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b"[" * 5000, "application/json", 400),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "application/json", 400),
        (b'{"a":' * 900 + rb'"\ud800"' + b"}" * 900, "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"{}", "application/x-www-form-urlencoded", 415),
        (b"{}", "application/xml", 415),
        (b"{}", "", 415),
        (b'{"a": "' + b"x" * 20_000 + b'"}', "application/json", 413),
    ],
)
def test_bad_bodies(client: TestClient, content: bytes, media_type: str, status: int) -> None:
    response = post(client, content, media_type)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (rb'{"messages": [{"content": "\ud800"}]}', "messages[0].content"),
        (rb'{"prompt": "a\uDFFFb"}', "prompt"),
        (rb'{"metadata": {"\udabc": 1}}', "metadata"),
        (rb'{"\ud800": 1}', None),
        (b'{"max_tokens": 1%s}' % (b"0" * 30), "max_tokens"),
        (b'{"prompt": [1, -9223372036854775809]}', "prompt[1]"),
    ],
)
def test_values_that_nothing_can_hold(
    client: TestClient, content: bytes, param: str | None
) -> None:
    response = post(client, content)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "content",
    [
        rb'{"prompt": "\ud83d\ude00", "seed": 9223372036854775807}',
        rb'{"prompt": "1234567890123456789012345 \\ud800", "temperature": 0.12345678901234567890}',
        b'\xef\xbb\xbf{"prompt": "x"}',
    ],
)
def test_values_that_only_look_like_it(client: TestClient, content: bytes) -> None:
    assert post(client, content).status_code == 200


def test_a_defect_is_a_500_with_a_request_id(client: TestClient) -> None:
    response = client.post(PATH, json={"break": True}, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", ["/v1/models/", "/"])
def test_errors_do_not_echo_long_names(client: TestClient, path: str) -> None:
    response = client.get(path + "a" * 10_000)
    assert response.status_code == 404
    assert len(response.json()["error"]["message"]) < 200


def test_a_body_without_length_is_limited_too(client: TestClient) -> None:
    chunks = (b"x" * 1000 for _ in range(20))
    response = client.post(PATH, content=chunks, headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_a_stream(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text == "data: 1\n\ndata: [DONE]\n\n"


def test_an_error_before_the_first_token_is_a_status_not_an_event(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, "fail_late": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"


def test_anthropics_routes_speak_anthropics_errors(client: TestClient) -> None:
    response = client.post(
        "/v1/messages", content=b"{", headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    wrong_method = client.get("/v1/messages")
    assert wrong_method.status_code == 405
    assert "POST" in wrong_method.headers["allow"]
    assert wrong_method.json()["type"] == "error"
    assert wrong_method.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("payload", "status"), [(CHAT, 200), ({"prompt": "x"}, 200), ({"input": "x"}, 200), ({}, 400)]
)
def test_invocations_go_by_shape(client: TestClient, payload: Any, status: int) -> None:
    assert client.post("/invocations", json=payload).status_code == status


@pytest.mark.parametrize(
    ("attributes", "status"),
    [
        ("route=/v1/chat/completions", 200),
        ("trace=7, route=/tokenize", 200),
        ("trace=7", 200),
        ("route=/metrics", 400),
        ("route=/v1/speculation", 400),
        ("route=/v1/../metrics", 400),
        ("route=", 400),
    ],
)
def test_invocations_go_where_the_header_says(
    client: TestClient, attributes: str, status: int
) -> None:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes}
    assert client.post("/invocations", json=CHAT, headers=headers).status_code == status


def test_an_adapter_that_cannot_be_served_is_refused(client: TestClient) -> None:
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": "mine"}
    response = client.post("/invocations", json=CHAT, headers=headers)
    assert response.status_code == 400
    assert "Adapter" in response.json()["error"]["message"]


def exchange(*inbox: dict[str, Any]) -> tuple[list[Any], FakeEngine]:
    """What raw ASGI sends to PATH for these messages of a client, and the engine behind it."""
    engine, messages, sent = FakeEngine(SETTINGS), iter(inbox), []
    engine.phase = Phase.READY

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    answering = create_app(SETTINGS, engine)(scope_of_post(), receive, send)
    asyncio.run(asyncio.wait_for(answering, IN_TIME_S))
    return sent, engine


def test_a_client_that_leaves_before_the_answer_cancels_the_work() -> None:
    """The body arrives, then the disconnect, while the operation still waits."""
    body = json.dumps({**CHAT, "wait": True}).encode()
    _, engine = exchange(
        {"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}
    )
    assert engine.fake.aborted == 1


@pytest.mark.parametrize(
    ("stops", "status", "code"), [(False, 504, "request_timeout"), (True, 503, "shutting_down")]
)
async def test_an_upload_ends_with_its_deadline_and_with_the_gateway(
    stops: bool, status: int, code: str
) -> None:
    """The fault: nothing ended it before `body_timeout_s`, and a stop cut it off without a word."""
    engine, sent = FakeEngine(SETTINGS), list[Any]()
    engine.phase = Phase.READY
    app = create_app(SETTINGS, engine)
    parts = iter([{"type": "http.request", "body": b'{"prompt": "ab', "more_body": True}])
    waits = asyncio.Event()

    async def receive() -> dict[str, Any]:
        for part in parts:
            return part
        waits.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = scope_of_post(**{"x-request-timeout": "20"})
    answering = asyncio.create_task(app(scope, receive, send))
    await waits.wait()
    if stops:
        app.state.admission.end_all()
    else:
        await let_pass(21)
    await asyncio.wait_for(answering, IN_TIME_S)
    start, body = sent
    assert start["status"] == status
    assert (b"connection", b"close") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == code
    assert app.state.admission.body_bytes == 0


def test_a_client_that_leaves_in_its_upload_is_no_defect() -> None:
    """No exception reaches the server, whose log would show its stack."""
    sent, _ = exchange(
        {"type": "http.request", "body": b'{"prompt": "ab', "more_body": True},
        {"type": "http.disconnect"},
    )
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1", True), ("x" * 65, False), ("a b", False), ("", False)]
)
def test_request_ids_are_echoed_only_if_harmless(
    client: TestClient, given: str, echoed: bool
) -> None:
    headers = {"x-request-id": given} if given else {}
    assert (client.get("/livez", headers=headers).headers["x-request-id"] == given) is echoed


def test_models_and_version(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["aerie-embedded"]
    assert client.get("/v1/models/aerie-embedded").json()["id"] == "aerie-embedded"
    missing = client.get("/v1/models/no/such")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert set(client.get("/version").json()) == {"version", "vllm"}
