"""What of a request reaches the engine core: cache salts and output limits, by every route."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from app.admission.estimate import estimate
from app.errors import ApiError
from app.llm.cache_salt import tenant_cache_salt
from app.llm.steps import StepWatch
from app.serving.operation import Operation
from app.validation.size_limits import count_sequences
from tests.app.serving.recording_core import CONTEXT, MESSAGES, Connect, RecordingCore, gateway

MODEL = "aerie-embedded"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_completion_tokens": 1},
    "/v1/completions": {"prompt": ["hi", "ho"], "max_tokens": 1, "n": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 1},
    "/invocations": {"messages": MESSAGES, "max_tokens": 1},
}


def salts(connect: Connect, requested: str | None, **given: Any) -> dict[tuple[str, str], set[Any]]:
    """(path, key) -> salts of the requests that reached the core."""

    async def scenario() -> dict[tuple[str, str], set[Any]]:
        core, found = RecordingCore(), dict[tuple[str, str], set[Any]]()
        async with gateway(connect(core), **given) as post:
            for path, key, stream in itertools.product(BODIES, ("one", "two"), (False, True)):
                body = dict(BODIES[path], stream=stream)
                if requested is not None:
                    body["cache_salt"] = requested
                response = await post(path, key, **body)
                assert response.status_code == 200, response.text
                assert len(core.requests) == count_sequences(body)
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


@pytest.mark.parametrize("given", [{"guarded": False}, {"share_prefix_cache": "true"}])
def test_without_keys_or_where_tenants_share_nothing_is_changed(
    connect: Connect, given: dict[str, Any]
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
        core, reached = RecordingCore(), 0
        served = connect(core).operations[operation]
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
    limit = operation.output_limit.of(body, assumed)
    return estimate(0, limit, count_sequences(body)).tokens


def test_a_smaller_limit_beside_the_one_that_counts_lets_nobody_past_the_quota(
    connect: Connect,
) -> None:
    """Ten at once of 60 tokens each, on a quota for three."""

    async def scenario() -> list[int]:
        core = RecordingCore()
        core.go.clear()
        async with gateway(connect(core), limits="tokens_per_minute = 300") as post:
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


LONG = " a" * 300
CUT = {"truncate_prompt_tokens": -1}


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/responses", {"input": LONG, "truncation": "auto"}, CONTEXT // 4),
        ("/v1/responses", {"input": LONG, "truncation": "auto", "max_output_tokens": 20}, 20),
        ("/v1/responses", {"input": LONG, "truncation": "auto", "max_output_tokens": 128}, 64),
        ("/v1/responses", {"input": "hi", "truncation": "auto", "max_output_tokens": 20}, 20),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], **CUT}, 32),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 20, **CUT}, 20),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 0, "echo": True, **CUT}, 1),
    ],
)
def test_a_prompt_that_is_cut_leaves_room_for_the_output(
    connect: Connect, config: Any, path: str, body: dict[str, Any], limit: int
) -> None:
    """Catches: a prompt cut to all of the context, which then was too long, or to all but one."""

    async def scenario() -> EngineCoreRequest:
        core = RecordingCore()
        async with gateway(connect(core)) as post:
            response = await post(path, "one", **body)
            assert response.status_code == 200, response.text
        [request] = core.requests
        return request

    request = asyncio.run(scenario())
    prompt = request.prompt_token_ids or []
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == limit
    assert (len(prompt) == CONTEXT - limit) is (LONG in json.dumps(body))
    if path != "/v1/completions":  # it was cut at its beginning
        text = renderer_from_config(config).get_tokenizer().decode(prompt)
        assert text.endswith("assistant\n")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_grammar_waits_for_reasoning_that_is_not_shown(connect: Connect, stream: bool) -> None:
    """Catches: reasoning held to the answer's format, of which a parser leaves nothing."""

    async def scenario() -> list[bool | None]:
        core = RecordingCore()
        async with gateway(connect(core, {"reasoning_parser": "qwen3"})) as post:
            for included in (True, False):
                body = {"messages": MESSAGES, "include_reasoning": included, "stream": stream}
                kind = {"response_format": {"type": "json_object"}}
                response = await post("/v1/chat/completions", "one", **body, **kind)
                assert response.status_code == 200, response.text
        return [request.reasoning_ended for request in core.requests]

    assert asyncio.run(scenario()) == [False, False]


COUNT = {"properties": {"n": {"type": "integer", "maximum": 2**64, "default": 2**64}}}
TOOL = {"name": "f", "parameters": COUNT}
CHAT_TOOLS = {"tools": [{"type": "function", "function": TOOL}], "truncate_prompt_tokens": -1}
NAMED = {"name": "x", "schema": COUNT}
CHAT_FORMAT = {"response_format": {"type": "json_schema", "json_schema": NAMED}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT_TOOLS),
        ("/v1/chat/completions", CHAT_FORMAT),
        ("/v1/responses", {"tools": [{"type": "function", **TOOL}], "truncation": "auto"}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", **NAMED}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": COUNT}}}),
    ],
)
def test_a_schema_with_integers_of_any_length_reaches_the_engine(
    connect: Connect, path: str, fields: dict[str, Any]
) -> None:
    async def scenario() -> EngineCoreRequest:
        core = RecordingCore()
        async with gateway(connect(core, {"tool_call_parser": "hermes"})) as post:
            response = await post(path, "one", **BODIES[path], **fields)
            assert response.status_code == 200, response.text
        return core.requests[0]

    request = asyncio.run(scenario())
    assert request.sampling_params is not None
    assert request.sampling_params.structured_outputs is not None
    assert MsgpackEncoder().encode(request)


class RunningOnCore(RecordingCore):
    """Answers with all tokens of a text in one step, as one with drafts does; none ends it."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens

    def answer(self, request: EngineCoreRequest) -> EngineCoreOutput:
        return EngineCoreOutput(request.request_id, list(self.tokens))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_charged_of_a_step_ends_with_the_stop_string(
    connect: Connect, config: Any, stream: bool
) -> None:
    """Catches: tokens behind it, which the answer's usage does not have."""
    tokenizer = renderer_from_config(config).get_tokenizer()
    tokens = tokenizer.encode("one two three four five six seven", add_special_tokens=False)
    labels = {"tenant": "one", "kind": "output"}

    def charged() -> float:
        return REGISTRY.get_sample_value("aerie_tenant_tokens_total", labels) or 0.0

    async def scenario() -> tuple[int, float]:
        before = charged()
        adapter = connect(RunningOnCore(tokens), stat_loggers=[lambda *_: StepWatch()])
        async with gateway(adapter) as post:
            options = {"stream": stream, "stream_options": {"include_usage": True}}
            body = {"prompt": "hi", "max_tokens": 60, "stop": "three"}
            response = await post("/v1/completions", "one", **body, **(options if stream else {}))
        assert response.status_code == 200, response.text
        usages = re.findall(r'"completion_tokens": ?([0-9]+)', response.text)
        return int(usages[-1]), charged() - before

    told, paid = asyncio.run(scenario())
    assert paid == told
    assert 0 < told < len(tokens)
