"""Hostile requests against a live gateway: none may end in a defect of ours, or leave a trace.

`make fuzz`; AERIE_FUZZ_CASES=400 is the short form, and another AERIE_FUZZ_SEED makes other cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from .fuzz import CORPUS, JSON, damaged, mutants
from .gateway import MODEL, Gateway
from .wire import HELD, LEAKS, metric, wait_for_metric

CASES = int(os.environ.get("AERIE_FUZZ_CASES", "400"))
SEED = int(os.environ.get("AERIE_FUZZ_SEED", "1"))
AT_ONCE = 8
ALL_SCHEMAS, SMALL_SCHEMAS = 1000, ("/v1/completions", "/detokenize", "/v1/speculation")
# By design, and not because of what a request says: full, not started in time, not done in time.
BY_DESIGN = {429, 503, 504}
RESTARTS = "aerie_engine_restarts_total"
DONE_WITHIN_S = 60.0
DEFECT = "The server had an error while processing your request."
# All of it: a case may ask for much, and is not kept waiting for long.
HEADERS = {"x-request-timeout": "20", "content-type": "application/json"}

pytestmark = [
    pytest.mark.skipif(
        "AERIE_FUZZ_CASES" not in os.environ, reason="hostile requests: `make fuzz`"
    ),
    pytest.mark.timeout(600 + CASES),
]


@pytest.fixture(autouse=True)
def nothing_is_left(http: httpx.Client, gateway: Gateway) -> Iterator[None]:
    """Whatever was asked: the same text as before, the same engine, nothing held."""
    question = {"model": MODEL, "prompt": "def read(", "max_tokens": 8, "temperature": 0}
    before = http.post("/v1/completions", json=question).json()["choices"]
    restarts = metric(http, RESTARTS)
    yield
    wait_for_metric(http, HELD, 0, DONE_WITHIN_S)
    assert metric(http, RESTARTS) == restarts, f"the engine died{gateway.tail()}"
    assert http.post("/v1/completions", json=question).json()["choices"] == before


def judge(status: int, kind: str, text: str, asked: object) -> None:
    """A refusal is a client's error in our envelope; a failure is none at all."""
    where = f"{ascii(asked)[:1500]} -> {status} {text[:500]}"
    assert status < 500 or status in BY_DESIGN, where
    if status < 400:
        return
    assert kind.startswith("application/json"), where
    error = json.loads(text)["error"]
    assert isinstance(error["message"], str), where
    assert error["message"], where
    assert len(error["message"]) < 4000, where
    leaks = [leak for leak in LEAKS if leak in error["message"] and leak not in str(asked)]
    assert not leaks, f"{leaks}: {where}"


def judge_response(response: httpx.Response, asked: object, seen: Counter[str]) -> None:
    seen[str(response.status_code)] += 1
    kind = response.headers.get("content-type", "")
    judge(response.status_code, kind, response.text, asked)
    for line in response.text.splitlines() if kind.startswith("text/event-stream") else ():
        assert not (line.startswith("data:") and DEFECT in line), f"{ascii(asked)[:1500]} -> {line}"


def send_all(gateway: Gateway, cases: list[tuple[str, Any, dict[str, str]]]) -> Counter[str]:
    """So many at once; the first that is wrong raises."""
    seen: Counter[str] = Counter()
    waiting = iter(cases)

    async def client(http: httpx.AsyncClient) -> None:
        for path, body, headers in waiting:
            content = None if body is None else json.dumps(body).encode()
            method = "GET" if body is None else "POST"
            if path == "/v1/speculation":
                method = "PATCH"
            response = await http.request(
                method, path, content=content, headers={**HEADERS, **headers}
            )
            judge_response(response, (method, path, body, headers), seen)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120, trust_env=False) as http:
            await asyncio.gather(*(client(http) for _ in range(AT_ONCE)))

    asyncio.run(run())
    return seen


def test_requests_picked_by_hand(gateway: Gateway) -> None:
    streamed = [
        (path, {**body, "stream": True}, headers)
        for path, body, headers in CORPUS
        if isinstance(body, dict) and "completions" in path
    ]
    seen = send_all(gateway, [*CORPUS, *streamed])
    print(f"{sum(seen.values())} by hand: {dict(seen)}")


def test_good_requests_with_something_changed(gateway: Gateway) -> None:
    cases = list(islice(mutants(Random(SEED)), CASES // 2))
    seen = send_all(gateway, [(path, body, {}) for path, body in cases])
    print(f"{sum(seen.values())} mutants: {dict(seen)}")
    assert seen["200"] > len(cases) / 20, "hardly any reaches the engine"


def test_damaged_bytes(gateway: Gateway) -> None:
    url = httpx.URL(gateway.url)
    seen: Counter[str] = Counter()
    unanswered: list[bytes] = []  # requests that were whole
    cases = islice(damaged(Random(SEED)), CASES // 4)

    async def one(data: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer; nothing if there was none."""
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(data)
            # What was cut short waits for its rest: its client leaves.
            async with asyncio.timeout(25 if _is_whole(data) else 0.2):
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                return head, await reader.readexactly(int(length[1])) if length else b""
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            return b"", b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()  # the loop may end, and closes no sockets

    async def client() -> None:
        for data in cases:
            head, content = await one(data)
            seen[head[9:12].decode() or "none"] += 1
            if not head and _is_whole(data):
                unanswered.append(data)
            if head and not content:  # a stream
                assert int(head[9:12]) < 400, f"{ascii(data)[:1500]} -> {head!r}"
            elif head:
                kind = "application/json" if b"application/json" in head else ""
                judge(int(head[9:12]), kind, content.decode(), data)

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    asyncio.run(run())
    print(f"{sum(seen.values())} damaged: {dict(seen)}")
    assert not unanswered, f"{len(unanswered)}, one of them {ascii(unanswered[0])[:1500]}"


def _is_whole(data: bytes) -> bool:
    head, _, content = data.partition(b"\r\n\r\n")
    length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
    return bool(length) and length[-1].split(b": ")[1] == str(len(content)).encode()


def test_what_the_openapi_document_allows_and_what_it_does_not(
    http: httpx.Client, gateway: Gateway
) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    document = http.get("/openapi.json").json()
    operations = [r.ok() for r in schemathesis.openapi.from_dict(document).get_all_operations()]
    operations = [o for o in operations if o.method.upper() in ("POST", "PATCH") and o.body]
    assert len(operations) >= 9, "the document lacks bodies"
    if CASES < ALL_SCHEMAS:  # cases for a chat take seconds to make
        operations = [o for o in operations if o.path in SMALL_SCHEMAS]
    seen: Counter[str] = Counter()
    each = max(2, CASES // 4 // (2 * len(operations)))
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            _generate(http, operation, mode, each, seen)
    print(f"{sum(seen.values())} by schema: {dict(seen)}")


def _generate(
    http: httpx.Client, operation: Any, mode: Any, count: int, seen: Counter[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schemas that cannot be negated
        strategy = operation.as_strategy(generation_mode=mode)

    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=strategy)
    def run(case: Any) -> None:
        body = case.body
        if isinstance(body, dict):
            _be_brief(body)
            content = json.dumps(body).encode()
        else:
            content = body if isinstance(body, bytes) else json.dumps(str(body)).encode()
        path = operation.path
        response = http.request(
            operation.method.upper(), path, content=content, headers=HEADERS, timeout=120
        )
        judge_response(response, (path, body), seen)

    run()


def _be_brief(body: JSON) -> None:
    """No case is about how long an answer may be."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 8:
            body[name] = 8
    if "prompt" in body or "messages" in body:
        body.setdefault("max_tokens", 4)
