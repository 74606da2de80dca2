"""Many requests at once, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest

from .bodies import greedy
from .gateway import Gateway
from .wire import ACTIVE, GENERATED, JSON, metric, post_chunks, text_of, wait_for_metric

CLIENTS = 32
# A float tie may fall the other way in another batch; more than this is a fault.
SAME = 0.95
ABORT_WITHIN_S = 15.0
ADMIT_WITHIN_S = 20.0
# 127,000 tokens: far more than a fast machine makes before the clients leave, or a slow one's
# gateway needs to notice that they left.
LONG_CLIENTS, COPIES = 8, 8


def request(i: int) -> JSON:
    return greedy(f"# part {i}\ndef step_{i}(value):\n    return ", max_tokens=16 + i)


def gather(url: str, calls: list[Callable[[openai.AsyncOpenAI], Awaitable[str]]]) -> list[str]:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60
        ) as client:
            return list(await asyncio.gather(*(call(client) for call in calls)))

    return asyncio.run(run())


def completed_at_once(gateway: Gateway, bodies: list[JSON]) -> list[str]:
    """The texts of whole answers."""

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
            calls = [client.post("/v1/completions", json=body) for body in bodies]
            answers = await asyncio.gather(*calls)
            return [text_of(answer.raise_for_status().json()) for answer in answers]

    return asyncio.run(run())


def test_thirty_two_at_once_equal_themselves_alone(http: httpx.Client, gateway: Gateway) -> None:
    alone = [text_of(http.post("/v1/completions", json=request(i)).json()) for i in range(CLIENTS)]

    def call(i: int) -> Callable[[openai.AsyncOpenAI], Awaitable[str]]:
        body = request(i)
        extra = {"ignore_eos": body.pop("ignore_eos")}

        async def whole(client: openai.AsyncOpenAI) -> str:
            answer = await client.completions.create(**body, extra_body=extra)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == body["max_tokens"]
            return answer.choices[0].text

        async def streamed(client: openai.AsyncOpenAI) -> str:
            pieces = await client.completions.create(**body, stream=True, extra_body=extra)
            return "".join([c.text async for p in pieces for c in p.choices])

        return streamed if i % 2 else whole

    together = gather(gateway.url, [call(i) for i in range(CLIENTS)])
    differing = [i for i in range(CLIENTS) if alone[i] != together[i]]
    for i in differing:
        print(f"request {i} alone:    {alone[i]!r}\nrequest {i} together: {together[i]!r}")
    assert len(differing) <= CLIENTS * (1 - SAME), (
        f"{len(differing)} of {CLIENTS} differ in a batch: {differing}"
    )


def test_different_kinds_share_a_batch(http: httpx.Client, gateway: Gateway) -> None:
    """A grammar's mask, a temperature and a stop string belong to their own row of the batch."""
    kinds: list[JSON] = [
        {"structured_outputs": {"choice": ["red", "green"]}, "ignore_eos": False},
        {"temperature": 1.5},
        {"stop": "e"},
        {},
    ]
    bodies = [{**request(i), "max_tokens": 40, **kinds[i % 4]} for i in range(16)]
    reference = [text_of(http.post("/v1/completions", json=b).json()) for b in bodies]
    texts = completed_at_once(gateway, bodies)
    assert all(texts[i] in {"red", "green"} for i in range(0, 16, 4)), texts[::4]
    assert all("e" not in texts[i] for i in range(2, 16, 4)), texts[2::4]
    same = sum(texts[i] == reference[i] for i in range(3, 16, 4))
    assert same >= 3, "a free greedy request changed beside constrained ones"


def test_seeded_requests_whose_prompts_are_read_in_steps(gateway: Gateway) -> None:
    """More prompt tokens at once than a step takes: some prompts are cut, and sampled in vain."""
    long = "value = compute(value)\n" * 100
    bodies = [greedy(f"# part {i}\n{long}", 8, seed=i, temperature=1.0) for i in range(16)]
    assert len(set(completed_at_once(gateway, bodies))) > 8, "seeds are not used"


def long_body(context_length: int, streaming: bool) -> bytes:
    """`COPIES` answers that run to the end of the context if nothing stops them."""
    body = {**request(0), "max_tokens": context_length - 64, "n": COPIES, "stream": streaming}
    return json.dumps(body).encode()


def send_raw(gateway: Gateway, body: bytes) -> socket.socket:
    """One request on its own connection, sent whole; nothing is read yet."""
    url = httpx.URL(gateway.url)
    connection = socket.create_connection((url.host, url.port or 80), timeout=30)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    )
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def assert_aborted(http: httpx.Client, before: float, context_length: int) -> None:
    took = wait_for_metric(http, ACTIVE, 0, ABORT_WITHIN_S)
    asked = LONG_CLIENTS * COPIES * (context_length - 64)
    made = metric(http, GENERATED) - before
    print(f"idle {took:.1f} s after the clients left, {made:.0f} of {asked} tokens made")
    assert made < 0.5 * asked, f"{made:.0f} of {asked} tokens were made: the requests ran on"


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_midway_frees_the_engine(
    http: httpx.Client, gateway: Gateway, context_length: int, streaming: bool
) -> None:
    wait_for_metric(http, ACTIVE, 0, 10)
    before = metric(http, GENERATED)
    connections = [
        send_raw(gateway, long_body(context_length, streaming)) for _ in range(LONG_CLIENTS)
    ]
    wait_for_metric(http, ACTIVE, LONG_CLIENTS * COPIES, ADMIT_WITHIN_S)
    if streaming:
        for connection in connections:
            assert connection.recv(1024).startswith(b"HTTP/1.1 200")
    for connection in connections:
        connection.close()
    assert_aborted(http, before, context_length)


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_before_the_first_token(
    http: httpx.Client, gateway: Gateway, context_length: int, streaming: bool
) -> None:
    wait_for_metric(http, ACTIVE, 0, 10)
    before = metric(http, GENERATED)
    for _ in range(LONG_CLIENTS):
        send_raw(gateway, long_body(context_length, streaming)).close()
    assert_aborted(http, before, context_length)
    # Also one that was admitted a moment after the count was first seen at zero.
    after = metric(http, GENERATED)
    http.post("/v1/completions", json={**request(1), "max_tokens": 8}).raise_for_status()
    assert metric(http, GENERATED) - after == 8, "something still generates"


def test_a_client_that_never_reads_harms_nobody(
    http: httpx.Client, gateway: Gateway, context_length: int
) -> None:
    idle = [send_raw(gateway, long_body(context_length, True)) for _ in range(2)]
    try:
        pieces = post_chunks(http, "/v1/completions", {**request(2), "max_tokens": 8})
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    finally:
        for connection in idle:
            connection.close()
    wait_for_metric(http, ACTIVE, 0, ABORT_WITHIN_S)
