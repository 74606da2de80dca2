"""What of a request reaches the engine core: cache salts and output limits, by every route.

vLLM's own classes run, from the HTTP body to the last object before the core's process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    async_llm,
)
from vllm.v1.outputs import LogprobsLists

from app.admission.estimate import estimate
from app.admission.tenants import digest_of
from app.endpoints import declared
from app.engine.configuration.options import engine_options
from app.engine.supervisor import Engine, Phase
from app.errors import ApiError
from app.llm.async_llm import GatewayLLM
from app.llm.cache_salt import tenant_cache_salt
from app.main import create_app
from app.serving.adapter import Adapter
from app.serving.operation import Operation
from app.settings import load

CONTEXT = 128
KEYS = "".join(
    f'[tenants.{name}]\n{{limits}}\n[[keys]]\nid = "{name}"\ntenant = "{name}"\n'
    f'sha256 = "{digest_of(name.encode())}"\n'
    for name in ("one", "two")
)
MODEL = "aerie-embedded"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_completion_tokens": 1},
    "/v1/completions": {"prompt": ["hi", "ho"], "max_tokens": 1, "n": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 1},
    "/invocations": {"messages": MESSAGES, "max_tokens": 1},
}


class RecordingCore:
    """Stands for the engine core: keeps every request, and answers each with one token, and with
    the log probabilities that it asks for."""

    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.resources = SimpleNamespace(engine_dead=False)
        self.go = asyncio.Event()
        self.go.set()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.requests.append(request)
        await self.go.wait()
        answer = EngineCoreOutput(request.request_id, [5], finish_reason=FinishReason.LENGTH)
        params = request.sampling_params
        if params is not None and params.logprobs is not None:
            answer.new_logprobs = LogprobsLists(
                np.array([[5, *range(10, 10 + params.logprobs)]]),
                -0.5 - np.arange(params.logprobs + 1, dtype=np.float32)[None],
                np.zeros(1, dtype=np.int64),
            )
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[answer]))

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """They have ended."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""


@pytest.fixture(scope="module")
def config() -> Any:
    settings = load({"k": "0", "max_model_len": str(CONTEXT)}, {}, preset="embedded")
    return AsyncEngineArgs(**engine_options(settings)).create_engine_config()


Connect = Callable[[], tuple[Adapter, RecordingCore]]


@pytest.fixture
def connect(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Makes the gateway's end of an engine, in the running event loop."""
    made: list[GatewayLLM] = []

    def make() -> tuple[Adapter, RecordingCore]:
        core = RecordingCore()
        monkeypatch.setattr(
            async_llm.EngineCoreClient, "make_async_mp_client", lambda **given: core
        )
        llm = GatewayLLM.from_vllm_config(config, disable_log_stats=True)
        made.append(llm)
        return Adapter(llm, load({}, {}, preset="embedded"), declared()), core

    yield make
    for llm in made:
        llm.shutdown()


class ReadyEngine(Engine):
    """Serves an adapter's operations."""

    adapter: Adapter

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Ready at once."""

    @property
    def ready(self) -> bool:
        return True

    def operation(self, name: str) -> Any:
        return self.adapter.operations[name]


@asynccontextmanager
async def gateway(adapter: Adapter, limits: str = "", **given: str) -> AsyncIterator[Any]:
    if "unguarded" not in given:
        given["keys"] = KEYS.format(limits=limits)
    given.pop("unguarded", None)
    settings = load(given, {}, preset="embedded")
    engine = ReadyEngine(settings)
    engine.phase, engine.adapter, engine.load.capacity = Phase.READY, adapter, 64
    engine._max_model_len = CONTEXT
    transport = httpx.ASGITransport(create_app(settings, engine))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", timeout=60
    ) as client:

        async def post(path: str, key: str, **body: Any) -> httpx.Response:
            return await client.post(path, json=body, headers={"x-api-key": key})

        yield post


def salts(connect: Connect, requested: str | None, **given: str) -> dict[tuple[str, str], set[Any]]:
    """(path, key) -> salts of the requests that reached the core."""

    async def scenario() -> dict[tuple[str, str], set[Any]]:
        adapter, core = connect()
        found = {}
        async with gateway(adapter, **given) as post:
            for path, key, stream in itertools.product(BODIES, ("one", "two"), (False, True)):
                body = dict(BODIES[path], stream=stream)
                if requested is not None:
                    body["cache_salt"] = requested
                response = await post(path, key, **body)
                assert response.status_code == 200, response.text
                sequences = estimate(body, 0, 1).sequences
                assert len(core.requests) == sequences
                found.setdefault((path, key), set()).update(r.cache_salt for r in core.requests)
                core.requests.clear()
        return found

    return asyncio.run(scenario())


def test_equal_prompts_of_two_tenants_have_different_salts_on_every_route(
    connect: Connect,
) -> None:
    plain = salts(connect, None)
    assert {key: salts for (_, key), salts in plain.items()} == {
        "one": {tenant_cache_salt("one", None)},
        "two": {tenant_cache_salt("two", None)},
    }
    assert len(set(map(frozenset, plain.values()))) == 2, "one for each tenant, on all routes"


def test_a_clients_salt_divides_its_own_entries_and_reaches_no_one_elses(connect: Connect) -> None:
    """Not even one that it knows: what it gives is never used as it is."""
    stolen = tenant_cache_salt("two", None)
    found = salts(connect, stolen)
    every = set.union(*found.values())
    assert len(every) == 2
    assert every.isdisjoint({stolen, tenant_cache_salt("one", None)})


@pytest.mark.parametrize("given", [{"unguarded": "yes"}, {"share_prefix_cache": "true"}])
def test_without_keys_or_where_tenants_share_nothing_is_changed(
    connect: Connect, given: dict[str, str]
) -> None:
    assert set.union(*salts(connect, None, **given).values()) == {None}
    assert set.union(*salts(connect, "mine", **given).values()) == {"mine"}


VALUES = (None, 1, 7, 60, 10**6)
FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"messages": MESSAGES, "n": n} for n in (None, 1, 3)],
    "completions": [
        {"prompt": prompt, "n": n, "echo": echo}
        for prompt in ("hi", ["hi", "ho"], [[5, 6], [7]], [5, 6])
        for n in (None, 3)
        for echo in (False, True)
    ],
    "responses": [{"input": "hi"}],
    "messages": [{"model": MODEL, "messages": MESSAGES}],
}
# What the model's generation_config.json says, and what the operator does.
DEFAULTS = {
    "none": ({}, {}),
    "model": ({"max_tokens": 40}, {}),
    "operator": ({"max_tokens": 50},) * 2,
}


def limits() -> Iterator[dict[str, int | None]]:
    """Every pair of limit fields with every pair of values; a field is absent, too."""
    yield {}
    for field, value in itertools.product(FIELDS, (*VALUES, 0)):
        yield {field: value}
    for (one, other), a, b in itertools.product(itertools.combinations(FIELDS, 2), VALUES, VALUES):
        yield {one: a, other: b}


@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize("operation", PROMPTS)
def test_what_is_charged_is_what_the_engine_obeys(
    connect: Connect, config: Any, monkeypatch: pytest.MonkeyPatch, operation: str, defaults: str
) -> None:
    """For all that gets as far as the engine. Only where nothing but the context ends an output may
    the charge be less: the setting's."""
    sampling, override = DEFAULTS[defaults]
    model = config.model_config
    monkeypatch.setattr(type(model), "get_diff_sampling_param", lambda self: dict(sampling))
    overridden = {"max_new_tokens": override["max_tokens"]} if override else {}
    monkeypatch.setattr(model, "override_generation_config", overridden)

    async def scenario() -> int:
        adapter, core = connect()
        served, reached = adapter.operations[operation], 0
        for shape, limit in itertools.product(PROMPTS[operation], limits()):
            body = {**{name: v for name, v in shape.items() if v is not None}, **limit}
            core.requests.clear()
            if not await accepted(served, body):
                assert core.requests == []
                continue
            reached += 1
            obeyed = [request.sampling_params.max_tokens for request in core.requests]
            room = [CONTEXT - len(request.prompt_token_ids) for request in core.requests]
            assert charged(served, body, CONTEXT) >= sum(obeyed), body
            if obeyed != room:  # exactly, and whatever the setting is
                assert charged(served, body, 1) == charged(served, body, CONTEXT) == sum(obeyed)
            assert charged(served, body, 10**9) <= CONTEXT * len(obeyed), body
        return reached

    assert asyncio.run(scenario()) >= 3 * len(PROMPTS[operation])


async def accepted(operation: Operation, body: dict[str, Any]) -> bool:
    try:
        await operation(json.loads(json.dumps(body)))
    except ApiError as error:
        return error.status != 400
    return True


def charged(operation: Operation, body: dict[str, Any], assumed: int) -> int:
    return estimate(body, 0, operation.output_limit.of(body, assumed)).tokens


def test_a_smaller_limit_beside_the_one_that_counts_lets_nobody_past_the_quota(
    connect: Connect,
) -> None:
    """Ten at once of 60 tokens each, on a quota for three."""

    async def scenario() -> list[int]:
        adapter, core = connect()
        core.go.clear()
        async with gateway(adapter, limits="tokens_per_minute = 300") as post:
            body = {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 60}
            asked = [
                asyncio.create_task(post("/v1/chat/completions", "one", **body)) for _ in range(10)
            ]
            await asyncio.wait(asked, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            while len(core.requests) + sum(task.done() for task in asked) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            core.go.set()
            return [response.status_code for response in await asyncio.gather(*asked)]

    statuses = asyncio.run(scenario())
    assert sorted(statuses) == [200] * 3 + [429] * 7
