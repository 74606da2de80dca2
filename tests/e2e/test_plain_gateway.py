"""A gateway without a head. Greedy output with drafts equals its output, token by token; nothing is
drafted; the prefix cache is hit as often. The last test ends it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from .conftest import CLIENT_TIMEOUT_S, serve
from .gateway import MODEL, POLL_S, STOP_WITHIN_S, Gateway
from .prompts import PROMPTS
from .test_drafting import DRAFTED, GENERATED, generate
from .test_prefix_cache import BLOCK, cached
from .wire import JSON, assert_error, chunks, metric, read_events

TOKENS = 128
AT_ONCE = 8


@pytest.fixture(scope="module")
def plain_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The shared gateway's model without any drafter."""
    log = tmp_path_factory.mktemp("plain") / "gateway.log"
    yield from serve(None, log, ["--k", "0", "--enforce-eager"])


@pytest.fixture(scope="module")
def plain_http(plain_gateway: Gateway) -> Iterator[httpx.Client]:
    url = plain_gateway.url
    with httpx.Client(base_url=url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as client:
        yield client


def greedy(http: httpx.Client, prompt: str) -> list[int]:
    response = http.post(
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": TOKENS,
            "return_token_ids": True,
        },
    )
    assert response.status_code == 200, response.text
    ids = list(response.json()["choices"][0]["token_ids"])
    assert len(ids) == TOKENS
    return ids


def explain(plain_http: httpx.Client, number: int, drafted: list[int], plain: list[int]) -> str:
    """Where two outputs part, and how far apart the plain model holds the two candidates there."""
    at = next(i for i, (a, b) in enumerate(zip(drafted, plain, strict=True)) if a != b)
    prompt = plain_http.post("/tokenize", json={"model": MODEL, "prompt": PROMPTS[number]}).json()[
        "tokens"
    ]
    body: JSON = plain_http.post(
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": prompt + plain[:at],
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": 1,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        },
    ).json()
    top = body["choices"][0]["logprobs"]["top_logprobs"][0]
    ours, theirs = (top.get(f"token_id:{t}") for t in (drafted[at], plain[at]))
    gap = "beyond the top five" if ours is None or theirs is None else f"{theirs - ours:.6f}"
    tokens = f"{drafted[at]} with drafts, {plain[at]} without"
    return f"prompt {number}, position {at}: {tokens}; logprob gap {gap}"


@pytest.mark.usefixtures("fixed_k")
def test_greedy_output_is_the_same_with_and_without_drafts(
    http: httpx.Client, plain_http: httpx.Client
) -> None:
    """Batches differ, too: requests begin and end when others are in the middle."""
    assert len(PROMPTS) == 32
    with ThreadPoolExecutor(AT_ONCE) as pool:
        drafted = list(pool.map(partial(greedy, http), PROMPTS))
        plain = list(pool.map(partial(greedy, plain_http), PROMPTS))
    reports = [
        explain(plain_http, number, *texts)
        for number, texts in enumerate(zip(drafted, plain, strict=True))
        if texts[0] != texts[1]
    ]
    assert not reports, "\n".join([f"{len(reports)} of {len(PROMPTS)} outputs differ:", *reports])


def test_a_plain_gateway_drafts_nothing(plain_http: httpx.Client) -> None:
    generate(plain_http, PROMPTS[0])
    text = plain_http.get("/metrics").text
    if DRAFTED in text:
        assert metric(plain_http, DRAFTED) == 0
    assert metric(plain_http, GENERATED) > 0


def test_a_gateway_without_drafts_caches_as_much(plain_http: httpx.Client) -> None:
    prompt = [3000 + place * 13 % 700 for place in range(3 * BLOCK + 1)]
    assert [cached(plain_http, prompt) for _ in range(2)] == [0, 3 * BLOCK]


def test_sigterm_lets_a_stream_finish(plain_gateway: Gateway, plain_http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "prompt": "def f(",
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 500,  # seconds, and far less than the drain may last
        "stream": True,
    }
    with plain_http.stream("POST", "/v1/completions", json=body) as response:
        events = read_events(response.iter_lines())
        seen = [next(events)]
        plain_gateway.signal(signal.SIGTERM)
        asked = new_work_while_draining(plain_gateway, body)
        seen += list(events)
    ends = [c["finish_reason"] for p in chunks(seen) for c in p["choices"] if c["finish_reason"]]
    assert ends == ["length"], "the stream was cut"
    if asked is not None:
        assert_error(asked, 503)
        assert int(asked.headers["retry-after"]) >= 1
    assert plain_gateway.wait_exit(STOP_WITHIN_S) == 0
    assert plain_gateway.leftovers() == []
    # Nor is the last word about what some library calls leaked.
    assert "leaked" not in plain_gateway.tail()


def new_work_while_draining(gateway: Gateway, body: dict[str, Any]) -> httpx.Response | None:
    """The answer to a request made once the gateway drains; None if it no longer listens.

    A connection that is made as the socket closes is reset, one that idles then is closed.
    """
    deadline = time.monotonic() + 3
    with httpx.Client(base_url=gateway.url, timeout=10, trust_env=False) as other:
        try:
            while other.get("/readyz").status_code == 200:
                assert time.monotonic() < deadline, "still says ready 3 s after SIGTERM"
                time.sleep(POLL_S)
            return other.post("/v1/completions", json={**body, "stream": False})
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            return None
