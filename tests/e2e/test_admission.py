"""Keys, quotas, the admission queue, the deadlines and spans in front of a real engine."""

from __future__ import annotations

import random
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.waiting import until

from .bodies import greedy
from .collector import Collector, receiving
from .gateway import MODEL, Gateway, environment
from .wire import ACTIVE, JSON, assert_error, metric, read_events, wait_for_metric

QUEUE_TIMEOUT_S = 3.0
FREE_WITHIN_S = 15.0
# More than the model makes while a test looks at it; every test ends it early.
LONG = 1500


class Keys:
    """The operator's side: the keys file, changed with the command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", "keys", *arguments, "--keys-file", str(self.path)],
            capture_output=True,
            text=True,
            check=True,
            env=environment({}),
        )
        return done.stdout

    def create(self, tenant: str, *limits: str) -> tuple[str, str]:
        words = self.run("create", tenant, *limits).split()
        return words[1], words[-1]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys.toml")


@pytest.fixture(scope="module")
def operator(keys: Keys) -> str:
    return keys.create("operator", "--priority", "-5", "--max-k", "2")[1]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with receiving() as made:
        yield made


@pytest.fixture(scope="module")
def guarded(
    keys: Keys, operator: str, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """Room for two sequences in a batch, two more in the engine's queue, two in the gateway's."""
    launched = Gateway.launch(
        tmp_path_factory.mktemp("guarded") / "gateway.log",
        [
            *("--keys-file", str(keys.path), "--keys-poll-s", "0.2"),
            *("--max-num-seqs", "2", "--max-running", "4", "--max-waiting", "2"),
            *("--queue-timeout-s", str(QUEUE_TIMEOUT_S)),
            *("--otlp-traces-endpoint", collector.endpoint),
            "--enforce-eager",  # starts faster; what is let in does not depend on it
        ],
        {"OTEL_BSP_SCHEDULE_DELAY": "100"},  # milliseconds between exports; 5,000 by default
    )
    with launched.serving() as gateway:
        yield gateway


@contextmanager
def holding(gateway: Gateway, key: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def http(guarded: Gateway, operator: str) -> Iterator[httpx.Client]:
    with holding(guarded, operator) as client:
        wait_for_metric(client, ACTIVE, 0, FREE_WITHIN_S)
        yield client
        wait_for_metric(client, ACTIVE, 0, FREE_WITHIN_S)
        assert metric(client, "aerie_gate_running") == 0
        assert metric(client, "aerie_gate_waiting") == 0


def body(max_tokens: int = 4, **changes: object) -> JSON:
    given = {"prompt": "def read_config(path):\n", "max_tokens": max_tokens, **changes}
    return greedy(**given)


def until_known(gateway: Gateway, key: str) -> None:
    """Wait until the gateway has read the keys file again."""
    with holding(gateway, key) as client:
        until(lambda: client.get("/v1/models").status_code != 401, 20, "the key is unknown", 0.05)


def remaining(response: httpx.Response, what: str) -> int:
    return int(response.headers[f"x-ratelimit-remaining-{what}"])


def test_the_official_client_and_a_revoked_key(guarded: Gateway, keys: Keys) -> None:
    key_id, secret = keys.create("short-lived")
    until_known(guarded, secret)
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=secret, max_retries=0) as client:
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
        keys.run("revoke", key_id)
        until(lambda: not holds(client), what="the revoked key still opens", every_s=0.05)


def holds(client: openai.OpenAI) -> bool:
    try:
        client.models.list()
    except openai.AuthenticationError:
        return False
    return True


def test_priority_and_k_reach_the_engine_and_time_is_told(http: httpx.Client) -> None:
    """The operator has both; an engine without the policy would refuse the priority."""
    response = http.post("/v1/completions", json=body(8))
    assert response.status_code == 200, response.text
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert set(timing) == {"queue", "prefill", "decode"}
    assert all(float(value) >= 0 for value in timing.values())
    assert float(timing["decode"]) > 0


def test_the_prefix_cache_tells_nobody_what_another_tenant_asked(
    guarded: Gateway, keys: Keys, http: httpx.Client
) -> None:
    """Prefill of a prompt that another tenant has just sent takes as long as that of a new one,
    where a prompt of one's own is found in the cache at once."""
    secret = keys.create("curious")[1]
    until_known(guarded, secret)
    chance = random.Random(7)

    def new_prompt() -> list[int]:
        return [chance.randrange(300, 1500) for _ in range(640)]

    with holding(guarded, secret) as curious:

        def prefill(client: httpx.Client, prompt: list[int]) -> tuple[float, int]:
            response = client.post("/v1/completions", json=body(1, prompt=prompt))
            assert response.status_code == 200, response.text
            timing = re.search(r"prefill;dur=([\d.]+)", response.headers["server-timing"])
            assert timing
            details = response.json()["usage"]["prompt_tokens_details"] or {}
            return float(timing[1]), details.get("cached_tokens") or 0

        rounds: list[tuple[tuple[float, int], ...]] = []
        for _ in range(12):
            anothers = new_prompt()
            prefill(http, anothers)
            rounds.append(
                (
                    prefill(curious, anothers),
                    prefill(curious, new_prompt()),
                    prefill(curious, anothers),
                )
            )
    sent_by_another, sent_by_nobody, sent_by_oneself = zip(*rounds, strict=True)
    assert all(cached == 0 for _, cached in (*sent_by_another, *sent_by_nobody))
    assert all(cached > 500 for _, cached in sent_by_oneself)
    assert 0.1 < share_longer(sent_by_nobody, sent_by_another) < 0.9
    assert share_longer(sent_by_nobody, sent_by_oneself) > 0.9


def share_longer(one: Sequence[tuple[float, int]], other: Sequence[tuple[float, int]]) -> float:
    """Of all pairs, those in which `one` took longer: a half where they do not differ."""
    pairs = [(a > b) + (a == b) / 2 for a, _ in one for b, _ in other]
    return sum(pairs) / len(pairs)


def test_what_was_used_is_what_is_paid(guarded: Gateway, keys: Keys, http: httpx.Client) -> None:
    limit = 6000
    secret = keys.create("payer", "--tokens-per-minute", str(limit))[1]
    until_known(guarded, secret)
    with holding(guarded, secret) as payer:
        used = 0
        started = time.monotonic()
        for changes in ({}, {"n": 2, "temperature": 1}, {"stream": True}):
            response = payer.post("/v1/completions", json=body(20, **changes))
            assert response.status_code == 200
            prompt = 5
            used += prompt + 20 * int(str(changes.get("n", 1)))
        probe = payer.post("/v1/completions", json=body(1))
        refilled = (time.monotonic() - started) * limit / 60
        charged = 1 + len(probe.request.content) // 4
        left = remaining(probe, "tokens")
        assert limit - used - charged - 3 <= left <= min(limit, limit - used + refilled + 3)


def test_a_cancelled_stream_is_charged_for_what_it_used(
    guarded: Gateway, keys: Keys, http: httpx.Client
) -> None:
    """A limit so high that a minute's refill does not hide the charge."""
    secret = keys.create("leaver", "--tokens-per-minute", "2000", "--max-concurrent", "1")[1]
    until_known(guarded, secret)
    before = metric(http, "vllm:generation_tokens_total")
    with holding(guarded, secret) as leaver:
        with leaver.stream("POST", "/v1/completions", json=body(LONG, stream=True)) as response:
            events = read_events(response.iter_lines())
            for _ in range(5):
                next(events)
            busy = http.post("/v1/completions", json=body(1))
            assert busy.status_code == 200
            second = leaver.post("/v1/completions", json=body(1))
            assert_error(second, 429, code="rate_limit_exceeded", kind="rate_limit_error")
        wait_for_metric(http, ACTIVE, 0, FREE_WITHIN_S)
    made = metric(http, "vllm:generation_tokens_total") - before
    prompt, output = (
        metric(http, "aerie_tenant_tokens_total", tenant="leaver", kind=kind)
        for kind in ("prompt", "output")
    )
    assert prompt == 5
    assert max(5, made - 40) <= output <= made, "tokens that were made were not charged"
    assert output < LONG


def test_who_cannot_start_in_time_leaves_the_engine(
    guarded: Gateway, operator: str, http: httpx.Client
) -> None:
    """Two run, two wait inside of the engine: the deadline takes those out again."""

    def ask(streaming: bool) -> httpx.Response:
        with holding(guarded, operator) as late:
            return late.post("/v1/completions", json=body(LONG, stream=streaming))

    with ThreadPoolExecutor(8) as pool, holding(guarded, operator) as holder:
        running = [
            holder.send(
                holder.build_request("POST", "/v1/completions", json=body(LONG, stream=True)),
                stream=True,
            )
            for _ in range(2)
        ]
        started = time.monotonic()
        late = [pool.submit(ask, streaming) for streaming in (False, True)]
        done, hanging = wait(late, timeout=QUEUE_TIMEOUT_S + FREE_WITHIN_S)
        waited_s = time.monotonic() - started
        if metric(http, "vllm:num_requests_running") < 2:
            pytest.skip("the machine finished the long requests before the deadline")
        assert not hanging, f"{[metric(http, name) for name in ACTIVE]}\n{guarded.tail()}"
        for answer in (one.result() for one in done):
            assert_error(answer, 503, code="queue_timeout")
            assert int(answer.headers["retry-after"]) >= 1
        assert waited_s >= QUEUE_TIMEOUT_S
        wait_for_metric(http, ["vllm:num_requests_waiting"], 0, FREE_WITHIN_S)
        for response in running:
            response.close()


def test_a_clients_timeout_ends_the_generation(http: httpx.Client) -> None:
    for seconds in ("1.0", "4.0"):  # a busy machine may take more than one to a first token
        response = http.post(
            "/v1/completions",
            json=body(LONG, n=2, temperature=1, stream=True),
            headers={"x-request-timeout": seconds},
        )
        if response.status_code == 200:
            break
    assert response.status_code == 200
    assert '"request_timeout"' in response.text.strip().splitlines()[-1]
    assert "[DONE]" not in response.text
    wait_for_metric(http, ACTIVE, 0, FREE_WITHIN_S)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_engines_spans_lie_below_the_gateways(
    http: httpx.Client, collector: Collector, operator: str, streaming: bool
) -> None:
    """One trace: the client's, the gateway's span in it, and one of vLLM for each sequence."""
    trace, client = secrets.token_hex(16), secrets.token_hex(8)
    response = http.post(
        "/v1/completions",
        json=body(8, n=2, temperature=1, stream=streaming),
        headers={"traceparent": f"00-{trace}-{client}-01"},
    )
    assert response.status_code == 200
    spans = collector.wait(trace, 3)
    [ours] = [span for span in spans if span.parent == client]
    assert ours.name.startswith("text_completion ")
    assert ours.attributes["gen_ai.usage.output_tokens"] == 16
    assert ours.attributes["aerie.tenant"] == "operator"
    engines = [span for span in spans if span is not ours]
    assert [(span.name, span.parent) for span in engines] == 2 * [("llm_request", ours.id)]
    assert {span.service for span in spans} == {"aerie"}
    for span in engines:
        assert span.attributes["gen_ai.usage.completion_tokens"] == 8
        assert span.attributes["gen_ai.latency.time_in_model_decode"] > 0
    for span in collector.spans:  # of everything so far
        assert b"read_config" not in span.wire
        assert operator.encode() not in span.wire


def test_a_trace_that_is_not_sampled_has_no_spans(http: httpx.Client, collector: Collector) -> None:
    """The client's word goes for the engine, too."""
    quiet, loud = secrets.token_hex(16), secrets.token_hex(16)
    for trace, flag in ((quiet, "00"), (loud, "01")):
        headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-{flag}"}
        assert http.post("/v1/completions", json=body(1), headers=headers).status_code == 200
    collector.wait(loud, 2)  # sent after, or with, what the other would have had
    assert quiet not in {span.trace for span in collector.spans}


def test_no_key_is_in_the_log(guarded: Gateway, operator: str, http: httpx.Client) -> None:
    assert operator not in guarded.text()
    assert "Traceback" not in guarded.text(), guarded.tail()
