"""Authentication, limits and deadlines, over HTTP and without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from fastapi import Depends

from app.admission.controller import PUBLIC, AdmissionController
from app.admission.limiter import MemoryLimiter
from app.admission.tenants import Identity, Tenant
from app.engine.supervisor import Phase
from app.errors import ApiError
from app.http.admin import admin_only
from app.http.request_context import RequestContext
from app.llm.engine_load import EngineLoad
from app.main import create_app
from app.observability import metrics
from app.settings import load
from tests.app.http.fake_operation import PATH, FakeEngine, scope_of_post
from tests.app.keys_file import tenant
from tests.clock import Clock
from tests.waiting import let_pass, soon

KEY, OTHER, ADMIN = "sk-aerie-one", "sk-aerie-two", "sk-aerie-admin"
OTHERS = f"{tenant('two', OTHER)}{tenant('admin', ADMIN)}admin = true\n"
Check = Callable[[httpx.AsyncClient, FakeEngine], Any]


def run(check: Check, limits: str = "", keys: bool = True, **settings: str) -> None:
    """One gateway, one client that holds key one."""
    given = {"keys": tenant("one", KEY, limits) + OTHERS} if keys else {}
    loaded = load({**given, **settings}, {}, preset="embedded")

    async def scenario() -> None:
        engine = FakeEngine(loaded)
        engine.phase = Phase.READY
        app = create_app(loaded, engine)
        app.state.admission.limiter = MemoryLimiter(Clock())  # no bucket fills by itself
        app.add_api_route("/admin", lambda: "done", dependencies=[Depends(admin_only)])
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {KEY}"} if keys else {}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers, timeout=20
        ) as client:
            await asyncio.wait_for(check(client, engine), 30)
        queue = app.state.admission.queue
        assert (queue.running, queue.waiting, engine.fake.running) == (0, 0, 0), "something is held"

    asyncio.run(scenario())


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    key = body.pop("key", None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await client.post(PATH, json={"prompt": "x", **body}, headers=headers)


TOKENIZING = (
    *("/tokenize", "/detokenize"),
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
)


async def tokenize(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    return await client.post(path, json={"tokenized": 1, **body})


def refused(response: httpx.Response, status: int, code: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "x-request-id" in response.headers
    if status == 429:
        assert int(response.headers["retry-after"]) >= 1
    assert KEY not in response.text
    return dict(error)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer")],
        [("authorization", f"Basic {KEY}")],
        [("authorization", KEY)],
        [("authorization", f"Bearer {KEY.upper()}")],
        [("authorization", f"Bearer {KEY}x")],
        [("authorization", f'Bearer "{KEY}"')],
        [("authorization", f"Bearer {KEY},{OTHER}")],
        [("authorization", f"Bearer {KEY}\0")],
        [("authorization", "Bearer " + "x" * 2**20)],
        [("authorization", "Bearer ' or 1=1 --")],
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {OTHER}")],
        [("authorization", f"Bearer {KEY}"), ("x-api-key", OTHER)],
        [("x-api-key", "")],
        [("api-key", KEY)],
    ],
)
def test_no_key_no_entry(headers: list[tuple[str, str]]) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        client.headers.pop("authorization")
        response = await client.post(PATH, json={"prompt": "x"}, headers=headers)
        error = refused(response, 401, "invalid_api_key")
        assert error["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"

    run(check)


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {KEY}")],
        [("authorization", f"bearer {KEY}")],
        [("Authorization", f"Bearer  {KEY} ")],
        [("x-api-key", KEY)],
        [("x-api-key", KEY), ("authorization", f"Bearer {KEY}")],
    ],
)
def test_both_dialects_of_showing_a_key(headers: list[tuple[str, str]]) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        client.headers.pop("authorization")
        response = await client.post(PATH, json={"prompt": "x"}, headers=headers)
        assert response.status_code == 200

    run(check)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models", "//v1/models", "/v1/../v1/models", "/v1%2Fmodels", "/%76%31/models",
        "/livez/../v1/models", "/livez/", "/livez%2f", "//livez", "/LIVEZ", "/livez;x", "/livez%00",
        "/invocations", "/tokenize", "/version", "/docs", "/openapi.json", "/", "/nope",
    ],
)  # fmt: skip
def test_every_path_but_the_public_ones_needs_a_key(path: str) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        client.headers.pop("authorization")
        for method in ("GET", "POST"):
            response = await client.request(method, path)
            assert response.status_code == 401, f"{method} {path}"

    run(check, page="false")  # whose paths are public, too (tests/app/page/test_files.py)


def test_public_paths() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        client.headers.pop("authorization")
        for path in (*load({}, {}).admission.public_paths.split(","), "/livez?x=/v1"):
            assert (await client.get(path)).status_code == 200, path
            assert (await client.head(path)).status_code == 200, path
        assert (await client.post("/ping")).status_code == 200

    run(check)


def test_public_paths_can_be_fewer() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        client.headers.pop("authorization")
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401

    run(check, public_paths="/livez, /readyz")


@pytest.mark.parametrize("keys", [[], [("authorization", "Bearer wrong")]])
def test_any_path_can_be_public(keys: list[tuple[str, str]]) -> None:
    """Without a valid key a request is the anonymous tenant's, with one it is the key's."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        client.headers.pop("authorization")
        figures = await client.get("/page/figures", headers=keys)
        assert (figures.status_code, figures.json()["admin"]) == (200, False)
        refused(await client.get("/admin", headers=keys), 403, "admin_required")
        for stream in (False, True):
            body = {"prompt": "x", "stream": stream}
            answer = await client.post(PATH, json=body, headers=keys)
            assert answer.status_code == 200
            assert not [name for name in answer.headers if "ratelimit" in name]
        assert (await client.get("/v1/responses/resp_1", headers=keys)).status_code == 404
        assert (await client.get("/v1/models", headers=keys)).status_code == 401
        assert engine.fake.usages == [(0, None)] * 2
        metrics = (await client.get("/metrics")).text
        assert 'aerie_tenant_tokens_total{kind="prompt",tenant="(anonymous)"}' in metrics

        assert (await post(client, key=KEY)).status_code == 200
        assert engine.fake.usages[-1] == (-3, 2)
        admin = {"authorization": f"Bearer {ADMIN}"}
        assert (await client.get("/page/figures", headers=admin)).json()["admin"] is True
        assert (await client.get("/admin", headers=admin)).status_code == 200

    paths = f"/metrics,/page/figures,/admin,/v1/responses/resp_1,{PATH}"
    run(check, "priority = -3\nmax_k = 2", public_paths=paths)


def test_no_tenant_of_a_keys_file_is_the_anonymous_one_of_public_paths() -> None:
    with pytest.raises(ValueError, match="name"):
        Tenant(name=PUBLIC)


def test_a_public_path_without_keys_is_as_any_other() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await client.get("/page/figures")).json()["admin"] is True

    run(check, keys=False, public_paths="/page/figures")


def test_without_keys_everybody_may_come_in() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await post(client)).status_code == 200
        assert (await client.get("/admin")).status_code == 200
        assert not [name for name in (await post(client)).headers if "ratelimit" in name]

    run(check, keys=False)


def test_without_keys_admin_routes_are_for_the_machine_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await post(client)).status_code == 200
        refused(await client.get("/admin"), 403, "admin_required")

    run(check, keys=False, host="0.0.0.0")
    assert "no API keys are configured" in caplog.text


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Forwarded-For"])
def test_without_keys_nobody_behind_a_proxy_is_an_admin(header: str) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        through = {header: "203.0.113.9"}
        changed = await client.patch("/v1/speculation", json={"objective": "off"}, headers=through)
        refused(changed, 403, "admin_required")
        assert (await client.get("/page/figures", headers=through)).json()["admin"] is False
        assert (await client.post(PATH, json={"prompt": "x"}, headers=through)).status_code == 200

    run(check, keys=False)


def test_admin_routes_need_an_admin_key() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert refused(await client.get("/admin"), 403, "admin_required")["type"] == (
            "permission_error"
        )
        admin = {"authorization": f"Bearer {ADMIN}"}
        assert (await client.get("/admin", headers=admin)).status_code == 200

    run(check)


def test_models_that_a_key_may_not_use() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for body in ({"model": "aerie-embedded"}, {}, {"model": None}):
            error = refused(await post(client, **body), 403, "model_not_allowed")
            assert error["param"] == "model"
        refused(await tokenize(client, "/tokenize"), 403, "model_not_allowed")
        assert (await post(client, key=OTHER)).status_code == 200
        assert engine.fake.usages == [(0, None)]

    run(check, 'models = ["other"]')


def test_priority_and_k_travel_with_the_request() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await post(client)).status_code == 200
        assert engine.fake.usages == [(-3, 2)]

    run(check, "priority = -3\nmax_k = 2")


def test_requests_per_minute() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        good = await post(client)
        assert good.headers["x-ratelimit-limit-requests"] == "2"
        assert good.headers["x-ratelimit-remaining-requests"] == "1"
        assert good.headers["x-ratelimit-reset-requests"]
        await post(client)
        bad = await post(client)
        error = refused(bad, 429, "rate_limit_exceeded")
        assert error["type"] == "rate_limit_error"
        assert bad.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await post(client, key=OTHER)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200

    run(check, "requests_per_minute = 2")


def test_a_refusal_comes_before_the_body() -> None:
    """A body that never arrives must not keep a 429 waiting."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        async def endless() -> AsyncGenerator[bytes, None]:
            yield b"{"
            raise AssertionError("the body was read")

        await post(client)
        headers = {"content-type": "application/json"}
        response = await client.post(PATH, content=endless(), headers=headers)
        refused(response, 429, "rate_limit_exceeded")

    run(check, "requests_per_minute = 1")


@pytest.mark.parametrize("limit", [1, 5])
def test_exactly_as_many_at_once_as_allowed(limit: int) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        tasks = [asyncio.create_task(post(client, wait=True)) for _ in range(40)]
        done, waiting = set(), set(tasks)
        while len(done) < 40 - limit:
            done, waiting = await asyncio.wait(waiting | done, timeout=0.05)
        await soon(lambda: engine.fake.running == limit)
        engine.fake.go.set()
        statuses = sorted([task.result().status_code for task in done])
        assert statuses == [429] * (40 - limit)
        assert [(await task).status_code for task in waiting] == [200] * limit
        assert (await post(client)).status_code == 200

    run(check, f"max_concurrent = {limit}", max_running="100")


def test_a_stream_counts_until_it_ends() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        stream = asyncio.create_task(post(client, stream=True, wait=True))
        await soon(lambda: engine.fake.running == 1)
        refused(await post(client), 429, "rate_limit_exceeded")
        engine.fake.go.set()
        assert (await stream).status_code == 200
        assert (await post(client)).status_code == 200

    run(check, "max_concurrent = 1")


def test_a_stream_that_is_generated_holds_nothing_while_it_is_read() -> None:
    """Catches: the next request of a client that has read the end, refused for the stream that it
    has read."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        app: Any = client._transport
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = {"prompt": "x", "max_tokens": 900, "used": 5, "stream": True}
        inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        reads = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await reads.wait()

        scope = scope_of_post(authorization=f"Bearer {KEY}")
        request = asyncio.create_task(app.app(scope, inbox.get, send))
        await soon(lambda: engine.fake.usages and not engine.fake.running)
        second = await post(client, max_tokens=900, used=5)
        assert second.status_code == 200, second.text
        reads.set()
        await request
        level = app.app.state.admission.limiter._tenants["one"].buckets["tokens"].level
        assert 969 < level < 1000, "each is charged for 15 tokens, and settled once"

    run(check, "max_concurrent = 1\ntokens_per_minute = 1000")


@pytest.mark.parametrize("stream", [False, True])
def test_no_deadline_ends_a_complete_answer_that_is_being_read(stream: bool) -> None:
    """The fault: a slow reader's answer counted among the requests that a deadline had ended, with
    its time over or the gateway stopping, and arrived whole."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        app: Any = client._transport
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = {"prompt": "x", "used": 5, "stream": stream}
        inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        begins, reads, sent = asyncio.Event(), asyncio.Event(), b""

        async def send(message: Any) -> None:
            nonlocal sent
            if message["type"] == "http.response.body":
                begins.set()
                await reads.wait()
                sent += message["body"]

        counted = {kind: metrics.EXPIRED.labels(kind)._value.get() for kind in ("total", "drain")}
        scope = scope_of_post(authorization=f"Bearer {KEY}")
        request = asyncio.create_task(app.app(scope, inbox.get, send))
        await begins.wait()
        await soon(lambda: not engine.fake.running)
        await let_pass(11)
        app.app.state.admission.end_all()
        reads.set()
        await request
        assert sent.endswith(b"[DONE]\n\n" if stream else b'{"ok":true}')
        for kind, before in counted.items():
            assert metrics.EXPIRED.labels(kind)._value.get() == before

    run(check, request_timeout_s="10")


def test_tokens_are_settled() -> None:
    """100 are charged, 30 used: the next request sees a bucket of 970, and then 940."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        remaining = []
        for _ in range(2):
            response = await post(client, max_tokens=100, used=20)
            remaining.append(int(response.headers["x-ratelimit-remaining-tokens"]))
        assert 885 <= remaining[0] <= 900
        assert 855 <= remaining[1] <= 875
        refused(await post(client, max_tokens=990), 429, "rate_limit_exceeded")
        never = await post(client, max_tokens=5000)
        refused(never, 429, "rate_limit_exceeded")
        assert never.headers["x-should-retry"] == "false"

    run(check, "tokens_per_minute = 1000")


@pytest.mark.parametrize("path", TOKENIZING)
def test_tokenizing_is_paid_for(path: str) -> None:
    """About 100 are charged for 400 bytes and settled to 500; 2,400 bytes are too much then."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = await tokenize(client, path, prompt="x" * 380, tokenized=500)
        assert 885 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 900
        assert (await tokenize(client, path, prompt="x" * 2400)).status_code == 429
        again = await tokenize(client, path)
        assert 485 <= int(again.headers["x-ratelimit-remaining-tokens"]) <= 500

    run(check, "tokens_per_minute = 1000")


@pytest.mark.parametrize("path", TOKENIZING)
def test_tokenizing_takes_a_place(path: str) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = asyncio.create_task(tokenize(client, path, wait=True))
        await soon(lambda: engine.fake.running == 1)
        assert (await tokenize(client, path)).status_code == 429
        refused(await post(client), 429, "server_overloaded")
        engine.fake.go.set()
        assert (await first).status_code == 200
        assert (await tokenize(client, path)).status_code == 200

    run(check, max_running="1", max_waiting="0")


def test_work_of_the_tokenizer_that_nobody_waits_for_is_paid_as_charged() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": "x" * 400, "wait": True}
        asked = asyncio.create_task(tokenize(client, "/tokenize", **body))
        await soon(lambda: engine.fake.running == 1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await soon(lambda: engine.fake.aborted == 1)
        left = int((await tokenize(client, "/tokenize")).headers["x-ratelimit-remaining-tokens"])
        assert 870 <= left <= 900

    run(check, "tokens_per_minute = 1000")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_pays_what_it_used(stream: bool) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        app: Any = client._transport
        admission = app.app.state.admission
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = {"prompt": "x", "max_tokens": 100, "used": 40, "wait": True, "stream": stream}
        inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

        async def send(message: Any) -> None:
            pass

        scope = scope_of_post(authorization=f"Bearer {KEY}")
        request = asyncio.create_task(app.app(scope, inbox.get, send))
        await soon(lambda: engine.fake.running == 1)
        level = admission.limiter._tenants["one"].buckets["tokens"]
        assert level.level < 900
        inbox.put_nowait({"type": "http.disconnect"})
        await request
        assert engine.fake.aborted == 1
        assert 949 < level.level < 952
        assert not admission.limiter._tenants["one"].places

    run(check, "tokens_per_minute = 1000\nmax_concurrent = 1")


def test_who_cannot_start_in_time_is_told_and_pays_nothing() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = asyncio.create_task(post(client, wait=True, used=1))
        await soon(lambda: engine.fake.running == 1)
        late = await post(client, max_tokens=100)
        refused(late, 503, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 1
        assert len(engine.fake.usages) == 1, "it had reached the engine"
        admission = client._transport.app.state.admission  # type: ignore[attr-defined]
        assert admission.limiter._tenants["one"].buckets["tokens"].level > 700
        engine.fake.go.set()
        assert (await first).status_code == 200

    run(check, "tokens_per_minute = 1000", max_running="1", queue_timeout_s="0.2")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_does_not_begin_is_aborted(stream: bool) -> None:
    """The engine says that requests wait: this one has no token, so it is one of them."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        async def busy() -> None:
            while True:
                engine.load.update(0, running=1, queued=0, deferred=1, kv_usage=0.5)
                await asyncio.sleep(0.05)

        reports = asyncio.create_task(busy())
        response = await post(client, wait=True, stream=stream)
        reports.cancel()
        if stream:
            assert '"queue_timeout"' in response.text
        else:
            refused(response, 503, "queue_timeout")
        await soon(lambda: engine.fake.aborted == 1)

    run(check, queue_timeout_s="0.3")


def test_a_long_prompt_is_not_called_waiting() -> None:
    """No token yet, but nobody waits in the engine: it is being worked on."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        task = asyncio.create_task(post(client, wait=True))
        await asyncio.sleep(0.8)
        assert not task.done()
        engine.fake.go.set()
        assert (await task).status_code == 200

    run(check, queue_timeout_s="0.2")


@pytest.mark.parametrize("two_priorities", [False, True])
def test_under_load_a_long_prompt_before_others_is_not_called_waiting(two_priorities: bool) -> None:
    """With two priorities the engine may have begun the later one first."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        long_prompt = asyncio.create_task(post(client, wait=True))
        await soon(lambda: engine.fake.running == 1)
        later = asyncio.create_task(post(client, key=OTHER, wait=True))
        await soon(lambda: engine.fake.running == 2)
        engine.load.update(0, running=1, queued=1, deferred=0, kv_usage=0.5)
        if two_priorities:
            refused(await long_prompt, 503, "queue_timeout")
            engine.fake.go.set()
            await later
            return
        refused(await later, 503, "queue_timeout")
        await asyncio.sleep(0.5)  # the engine has not reported since
        assert not long_prompt.done()
        engine.fake.go.set()
        assert (await long_prompt).status_code == 200

    run(check, "priority = 1" if two_priorities else "", queue_timeout_s="0.2")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_client", [False, True])
def test_requests_end_in_time(stream: bool, by_client: bool) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        if by_client:
            client.headers["x-request-timeout"] = "10"
        asked = asyncio.create_task(post(client, wait=True, stream=stream, used=5))
        await soon(lambda: engine.fake.running == 1)
        for _ in range(50):  # turns of the event loop, in which a stream's first event is sent
            await asyncio.sleep(0)
        await let_pass(11)
        response = await asked
        if stream:
            assert response.text.startswith("data: 1\n\n")
            assert '"request_timeout"' in response.text
        else:
            refused(response, 504, "request_timeout")
            assert response.headers["x-should-retry"] == "false"  # it would run three times
        await soon(lambda: engine.fake.aborted == 1)

    run(check, **({} if by_client else {"request_timeout_s": "10"}))


@pytest.mark.parametrize("given", ["", "0", "-1", "soon", "nan", "inf", "1e999", "9" * 1000])
def test_a_timeout_must_be_a_number_of_seconds(given: str) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        client.headers["x-request-timeout"] = given
        response = await post(client)
        assert response.status_code == 400
        assert "x-request-timeout" in response.json()["error"]["message"]

    run(check)


def test_overload_is_a_429_at_once() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        tasks = [asyncio.create_task(post(client, wait=True)) for _ in range(4)]
        queue = client._transport.app.state.admission.queue  # type: ignore[attr-defined]
        await soon(lambda: queue.waiting == 2)
        refused(await post(client), 429, "server_overloaded")
        assert engine.fake.most_running == 2
        engine.fake.go.set()
        assert [(await task).status_code for task in tasks] == [200] * 4

    run(check, max_running="2", max_waiting="2")


TOO_MANY = 10**9
LONG_LIST = ["x"] * 1000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {"prompt": "x", "n": TOO_MANY}, "n"),
        (PATH, {"prompt": LONG_LIST}, "prompt"),
        ("/v1/chat/completions", {"messages": [], "n": TOO_MANY}, "n"),
        ("/invocations", {"prompt": "x", "n": TOO_MANY}, "n"),
    ],
)
def test_more_sequences_than_any_request_may_have_are_refused_at_once(
    path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    """Nobody waits behind a request that would wait until it has the engine for itself."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = asyncio.create_task(post(client, wait=True))
        await soon(lambda: engine.fake.running == 1)
        bad = await client.post(path, json={**body, "stream": stream})
        assert refused(bad, 400, None)["param"] == param
        assert (await post(client)).status_code == 200
        assert len(engine.fake.usages) == 2, "it had reached the engine"
        engine.fake.go.set()
        assert (await first).status_code == 200

    run(check, max_running="200")


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (PATH, {"prompt_embeds": LONG_LIST}),
        (PATH, {"best_of": TOO_MANY}),
        ("/v1/chat/completions", {"prompt": LONG_LIST}),
        ("/v1/chat/completions", {"best_of": TOO_MANY}),
        ("/v1/responses", {"n": TOO_MANY, "prompt": LONG_LIST, "store": False}),
        ("/v1/messages", {"n": TOO_MANY, "prompt": LONG_LIST}),
        ("/tokenize", {"n": TOO_MANY, "prompt": LONG_LIST}),
    ],
)
def test_fields_that_ask_for_no_sequences_take_no_slots(path: str, extra: dict[str, Any]) -> None:
    """Where validation refuses a field, its value must not keep the request waiting until then."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = asyncio.create_task(post(client, wait=True))
        await soon(lambda: engine.fake.running == 1)
        answer = await client.post(path, json={"prompt": "x", **extra})
        assert answer.status_code == 200  # of the operation here, which checks nothing
        engine.fake.go.set()
        assert (await first).status_code == 200

    run(check, max_running="2")


def test_bodies_share_a_bound() -> None:
    """Each is small enough, and all of them would not fit."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        large = {"prompt": "x" * 600_000}
        first = asyncio.create_task(post(client, wait=True, **large))
        await soon(lambda: engine.fake.running == 1)
        refused(await post(client, **large), 429, "server_overloaded")
        assert (await post(client)).status_code == 200
        engine.fake.go.set()
        assert (await first).status_code == 200
        assert (await post(client, **large)).status_code == 200
        assert client._transport.app.state.admission.body_bytes == 0  # type: ignore[attr-defined]

    run(check, keys=False, max_bodies_mib="1")


def test_bodies_of_one_tenant_leave_room_for_others() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        large = {"prompt": "x" * 400_000}
        first = asyncio.create_task(post(client, wait=True, **large))
        await soon(lambda: engine.fake.running == 1)
        refused(await post(client, **large), 429, "server_overloaded")
        other = asyncio.create_task(post(client, key=OTHER, wait=True, **large))
        await soon(lambda: engine.fake.running == 2)
        refused(await post(client, key=ADMIN, **large), 429, "server_overloaded")
        engine.fake.go.set()
        assert [(await task).status_code for task in (first, other)] == [200, 200]
        assert (await post(client, **large)).status_code == 200

    run(check, max_bodies_mib="1")


def test_bodies_of_the_only_tenant_may_have_all_the_room() -> None:
    settings = load({"api_key": KEY, "max_bodies_mib": "1"}, {})
    admission = AdmissionController(settings, EngineLoad(capacity=8))
    (only,) = admission.keys.ring.tenants.values()
    RequestContext(admission, Identity(only)).reserve_body_bytes(2**20)
    with pytest.raises(ApiError):
        RequestContext(admission, Identity(only)).reserve_body_bytes(1)


def test_a_body_that_stops_coming() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        async def stalled() -> AsyncGenerator[bytes, None]:
            yield b"{"
            await asyncio.sleep(30)

        headers = {"content-type": "application/json"}
        response = await client.post(PATH, content=stalled(), headers=headers)
        assert response.status_code == 408
        assert response.headers["connection"] == "close"

    run(check, body_timeout_s="0.2")


def test_server_timing() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        timing = (await post(client, used=3)).headers["server-timing"]
        parts = dict(part.split(";dur=") for part in timing.split(", "))
        assert float(parts["prefill"]) == 1000.0
        assert float(parts["decode"]) == 1000.0
        assert float(parts["queue"]) >= 0
        assert "decode" in (await post(client, used=3, stream=True)).headers["server-timing"]

    run(check)


def test_what_was_drafted_is_told_once_it_is_known() -> None:
    """Four steps verified drafts, three accepted one."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        told = (await post(client, used=3)).headers["x-aerie-speculation"]
        assert told == "drafted=12, accepted=3, k=3.00, length=1.75"
        assert "x-aerie-speculation" not in (await post(client, used=3, stream=True)).headers

    run(check)


def test_a_gateway_that_is_not_ready_charges_nothing() -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.phase = Phase.LOADING
        for _ in range(3):
            refused(await post(client), 503, "engine_not_ready")
        engine.phase = Phase.READY
        assert (await post(client)).status_code == 200

    run(check, "requests_per_minute = 1")


def test_nothing_that_a_client_sends_becomes_a_label_or_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for i in range(20):
            await post(client, model=f"marker{i}", user=f"marker{i}")
            bad = {"authorization": f"Bearer marker{i}", "x-request-id": f"marker{i}\\n"}
            await client.post(f"/marker{i}", json={}, headers=bad)
        metrics = (await client.get("/metrics")).text
        assert "marker" not in metrics
        assert 'aerie_requests_refused_total{reason="key"}' in metrics
        assert 'aerie_tenant_tokens_total{kind="prompt",tenant="one"}' in metrics

    run(check)
    assert "marker" not in caplog.text
    assert KEY not in caplog.text


def test_the_log_says_what_a_request_came_to(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a figure, the tenant or the key's id that is missing, and a client's text."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "abc"}
        body = {"prompt": "x", "used": 7, "user": "marker"}
        await client.post(PATH, json=body, headers=headers)
        await client.get("/livez")  # has no line
        await post(client, key="marker")
        async with client.stream(
            "POST", PATH, json={"prompt": "marker", "stream": True}
        ) as response:
            await response.aread()

    with caplog.at_level("INFO", "app.http.access_log"):
        run(check, access_log="true")
    first, second, third = (r.fields for r in caplog.records if r.name == "app.http.access_log")  # type: ignore[attr-defined]
    measured = ("seconds", "gate_s")
    assert all(first[name] >= 0 for name in measured)
    assert {k: v for k, v in first.items() if k not in measured} == {
        "request_id": "abc", "path": PATH, "status": "200", "model": "aerie-embedded",
        "tenant": "one", "key": "one",
        "prompt_tokens": 10, "output_tokens": 7,
        "queued_s": 0.0, "prefill_s": 1.0, "decode_s": 1.0,
        "drafted": 12, "accepted": 3, "k": 3.0, "acceptance_length": 1.75,
    }  # fmt: skip
    assert second["status"] == "401"
    assert "tenant" not in second
    assert (third["status"], third["prompt_tokens"]) == ("200", 10)
    assert not [r for r in caplog.records if "marker" in str(vars(r))]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("evil.example", 403), ("evil.example.:8000", 403), ("[bad.example", 403)),
        *(("localhost:8000", 200), ("LOCALHOST.", 200), ("127.0.0.1:8000", 200)),
        *(("[::1]:8000", 200), ("[::ffff:127.0.0.1]", 200), ("chat.example:81", 200)),
        *(("host.docker.internal:8000", 200), ("aerie.localhost", 200), ("internal.example", 403)),
    ],
)
def test_a_page_that_made_this_machines_address_its_own_is_kept_out(host: str, status: int) -> None:
    """By DNS rebinding. Where there are keys, or others reach the gateway anyway, all go on."""

    async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        response = await client.get("/admin", headers={"host": host})
        if status == 403:
            refused(response, 403, "host_not_allowed")
        else:
            assert response.status_code == 200

    async def goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 200

    run(check, keys=False, allowed_origins="https://chat.example")
    run(goes_on)
    run(goes_on, keys=False, host="0.0.0.0")
    run(goes_on, keys=False, allowed_origins="*")
