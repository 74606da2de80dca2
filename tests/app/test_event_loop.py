"""The worst bodies that the limits let through, beside a running stream.

Nothing is faked but the engine core: vLLM's serving classes, renderer and tokenizer work on the
embedded model. A gap is told in seconds of this process's CPU, which other processes of a busy
machine do not lengthen: it is the time for which the gateway kept its own event loop waiting.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from app.admission.controller import ANONYMOUS
from app.endpoints import declared
from app.engine.freeze_gc import freeze_gc
from app.engine.supervisor import Phase
from app.http.body.limits import BodyLimits, body_limits
from app.main import create_app
from app.routes.operations import metered_paths
from app.routes.response_store import StoredItem, StoredResponse
from app.serving.adapter import Adapter
from app.settings import load
from tests.app.fake_engine import FakeLlm
from tests.app.phased_engine import PhasedEngine

SETTINGS = load({}, {}, preset="embedded")
MODEL = SETTINGS.served_model_name
CHUNK_S = 0.01
MOST_GAP_S = 0.2
MOST_LIVEZ_S = 0.1
TRIES = 3  # another process may have the cores in one of them
MOST_GROWTH = 1.1
Body = dict[str, Any]


class EndlessLlm(FakeLlm):
    """Every request gets one token, but for a stream without end, which gets one every
    `CHUNK_S`."""

    async def _outputs(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any]:
        params.update_from_tokenizer(self.renderer.get_tokenizer())  # as AsyncLLM does, in the loop
        endless = params.ignore_eos
        while True:
            end = None if endless else "stop"
            token = CompletionOutput(0, "x", [1], 0.0, None, finish_reason=end)
            yield RequestOutput(request_id, None, [1], None, [token], not endless)
            if not endless:
                return
            await asyncio.sleep(CHUNK_S)


class ReadyEngine(PhasedEngine):
    """An engine without processes that serves from the start."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        llm = EndlessLlm("")
        self._adapter = Adapter(llm, SETTINGS, declared())  # type: ignore[arg-type]
        self._adapter.warm_up()
        self._max_model_len = llm.model_config.max_model_len
        self.phase = Phase.READY
        self.load.capacity = 256

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Nothing to start."""


@dataclass
class Gateway:
    """The application, called as a server would call it."""

    app: Any
    gaps: list[float] = field(default_factory=list)
    livez: list[float] = field(default_factory=list)

    async def post(
        self, path: str, body: bytes, on_part: Callable[[], None] = lambda: None
    ) -> tuple[int, bytes]:
        status, answer = 0, bytearray()
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            on_part()

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST" if body else "GET", "path": path, "raw_path": b"",
            "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("t", 1),
            "headers": headers, "root_path": "",
        }  # fmt: skip
        await self.app(scope, receive, send)
        return status, bytes(answer)

    @asynccontextmanager
    async def beside_a_stream(self) -> AsyncGenerator[None, None]:
        """A stream and a prober of /livez, for as long as the block runs."""
        last = time.process_time()

        def note() -> None:
            nonlocal last
            now = time.process_time()
            self.gaps.append(now - last)
            last = now

        async def probe() -> None:
            while True:
                await asyncio.sleep(CHUNK_S)
                began = time.process_time()
                status, _ = await self.post("/livez", b"")
                assert status == 200
                self.livez.append(time.process_time() - began)

        endless = chat({"role": "user", "content": "a"}, stream=True, ignore_eos=True)
        stream = asyncio.create_task(
            self.post("/v1/chat/completions", json.dumps(endless).encode(), note)
        )
        prober = asyncio.create_task(probe())
        while len(self.gaps) < 5:  # noqa: ASYNC110
            await asyncio.sleep(CHUNK_S)
        self.gaps.clear()
        try:
            yield
            await asyncio.sleep(3 * CHUNK_S)
        finally:
            for task in (stream, prober):
                task.cancel()
            await asyncio.gather(stream, prober, return_exceptions=True)


@pytest.fixture(scope="module")
def engine() -> ReadyEngine:
    engine = ReadyEngine()
    freeze_gc()  # as the supervisor does
    return engine


@pytest.fixture(scope="module")
def limits(engine: ReadyEngine) -> BodyLimits:
    return body_limits(SETTINGS, engine.max_model_len, False)


def chat(*messages: Any, **fields: Any) -> Body:
    return {"model": MODEL, "messages": list(messages), **fields}


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
INPUT_TOKENS = "/v1/responses/input_tokens"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(90)}}
EMOJI = "\N{GRINNING FACE}"  # which json.dumps writes as two escapes


RESPONSE, TEXTS, SMALL_ITEM, LARGE_ITEM = "resp_values", "resp_texts", "msg_small", "msg_large"


def keep_the_worst(app: Any) -> None:
    """Fill all that a tenant may keep with one conversation, as its turns could have."""
    store, bounds = app.state.responses, SETTINGS.limits

    def output(item_id: str, text: str, logprobs: int) -> StoredItem:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": [{}] * logprobs}
        message = {"type": "message", "role": "assistant", "id": item_id, "content": [part]}
        return StoredItem.of(message)

    small = output(SMALL_ITEM, "x" * (store.limit_bytes // bounds.max_input_items - 200), 0)
    large = output(LARGE_ITEM, "x", 32_000)
    room = (store.limit_bytes - 2 * len(large.data)) // bounds.max_input_items
    earlier = StoredItem.of({**user("a"), "logprobs": [{}] * (room // len("{}, ") - 100)})
    items = (earlier,) * (bounds.max_input_items - 3)
    assert store.put(ANONYMOUS, RESPONSE, StoredResponse(items, (small, large), b"{}"))
    texts = (StoredItem.of(user("a" * 12_000)),) * 10
    assert store.put(ANONYMOUS, TEXTS, StoredResponse(texts, (), b"{}"))
    assert store.get(ANONYMOUS, RESPONSE) is not None


def worst(limits: BodyLimits) -> Iterator[tuple[str, str, Body]]:
    """Path, what is large about it, and a body as large as the limits allow."""
    bounds = SETTINGS.limits
    values = limits.structure.values - 200
    containers = limits.structure.containers - 200
    escapes, letters = limits.size // 12 - 200, limits.size - 2000
    parts = [{"type": "text", "text": EMOJI}] * (bounds.max_content_parts - 1)
    items = [{"type": "input_text", "text": "a"}] * (bounds.max_content_parts - 1)
    long = EMOJI * escapes
    functions = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": TOOL}}
        for i in range(bounds.max_tools)
    ]
    arguments = json.dumps({"a": [1] * 65_000})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    yield CHAT, "values", chat(user(EMOJI), metadata={"a": [1] * values})
    yield CHAT, "containers", chat(user(EMOJI), metadata={"a": [{}] * (values // 2)})
    yield CHAT, "values of a message", chat({**user("a"), "x": [1] * values})
    yield CHAT, "nesting", chat(user("a"), metadata={"a": [nested(120)] * (containers // 120)})
    yield CHAT, "escapes", chat(user(long))
    yield CHAT, "letters", chat(user("x" * letters))
    yield CHAT, "parts", chat(user(parts))
    yield CHAT, "messages", chat(*[user("a")] * bounds.max_messages)
    yield CHAT, "messages of parts", chat(*[user(parts[:2])] * bounds.max_messages)
    yield CHAT, "messages that are none", chat(*[{"role": "user"}] * bounds.max_messages)
    yield CHAT, "tools", chat(user("a"), tools=functions, tool_choice="required")
    yield CHAT, "arguments", chat(user("a"), {"role": "assistant", "tool_calls": [call]})
    yield TEXT, "token ids", {"model": MODEL, "prompt": [1] * values}
    yield TEXT, "no token ids", {"model": MODEL, "prompt": [1] * (values - 1) + ["a"]}
    yield TEXT, "batches", {"model": MODEL, "prompt": [[1] * 500] * 128}
    yield TEXT, "escapes", {"model": MODEL, "prompt": long}
    words = [EMOJI * (bounds.max_bad_words_length // bounds.max_bad_words)] * bounds.max_bad_words
    yield TEXT, "bad words", {"model": MODEL, "prompt": "a", "bad_words": words}
    yield TEXT, "long bad words", {"model": MODEL, "prompt": "a", "bad_words": [long]}
    yield RESPONSES, "parts", {"model": MODEL, "input": [{**user(items), "type": "message"}]}
    yield RESPONSES, "items", {"model": MODEL, "input": [user("a")] * bounds.max_input_items}
    yield RESPONSES, "items that are none", {
        "model": MODEL, "input": [{"type": "message"}] * bounds.max_input_items,
    }  # fmt: skip
    yield CHAT, "messages with a bad name", chat(*[{**user("a"), "name": 5}] * bounds.max_messages)
    yield RESPONSES, "escapes", {"model": MODEL, "input": long}
    small, large = {"id": SMALL_ITEM}, {"type": "item_reference", "id": LARGE_ITEM}
    yield RESPONSES, "too many references", {"model": MODEL, "input": [small] * 30_000}
    yield RESPONSES, "references", {"model": MODEL, "input": [small] * bounds.max_input_items}
    yield RESPONSES, "reference to values", {"model": MODEL, "input": [large]}
    yield RESPONSES, "references to values", {"model": MODEL, "input": [large] * 30}
    yield RESPONSES, "too large references", {"model": MODEL, "input": [large] * 500}
    for response in (RESPONSE, TEXTS):
        yield RESPONSES, f"earlier turns, {response}", {
            "model": MODEL, "input": "a", "previous_response_id": response,
        }  # fmt: skip
    yield INPUT_TOKENS, "parts", {"model": MODEL, "input": [{**user(items), "type": "message"}]}
    yield INPUT_TOKENS, "earlier turns", {
        "model": MODEL, "input": "a", "previous_response_id": RESPONSE,
    }  # fmt: skip
    yield MESSAGES, "parts", chat(user(parts), max_tokens=1)
    yield MESSAGES, "messages", chat(*[user("a")] * bounds.max_messages, max_tokens=1)
    yield COUNT, "parts", chat(user(parts))
    yield COUNT, "values", chat({**user("a"), "x": [1] * values})
    yield "/tokenize", "escapes", {"model": MODEL, "prompt": long}
    yield "/tokenize", "letters", {"model": MODEL, "prompt": " " * letters}
    yield "/tokenize", "parts", chat(user(parts), return_token_strs=True)
    yield "/detokenize", "token ids", {"model": MODEL, "tokens": [1] * values}
    yield "/detokenize", "the context", {"model": MODEL, "tokens": [300] * 2048}
    yield (
        "/invocations",
        "values",
        {"model": MODEL, "prompt": EMOJI, "x": [1] * values},
    )


def test_every_route_is_attacked(limits: BodyLimits) -> None:
    assert {path for path, _, _ in worst(limits)} == metered_paths(declared())


@pytest.mark.timeout(900)
async def test_no_body_holds_up_a_stream(engine: ReadyEngine, limits: BodyLimits) -> None:
    """Gaps that the machine makes by itself are measured first, without a body. A body that holds
    up the stream does so each time."""
    slow: list[str] = []
    quiet = Gateway(create_app(SETTINGS, engine))
    async with quiet.beside_a_stream():
        await asyncio.sleep(50 * CHUNK_S)
    noise = max(quiet.gaps)
    for path, what, body in worst(limits):
        data = json.dumps(body).encode()
        assert len(data) <= limits.size, f"{path} {what}: the limits do not let it through"
        for _ in range(TRIES):
            gateway = Gateway(quiet.app)
            keep_the_worst(gateway.app)
            async with gateway.beside_a_stream():
                began = time.process_time()
                status, answer = await gateway.post(path, data)
                seconds = time.process_time() - began
            assert status in (200, 400, 413), f"{path} {what}: {status} {answer[:200]!r}"
            assert b"not found" not in answer, f"{path} {what}: {answer[:200]!r}"
            # Too few probes for a 99th percentile: none of them may be slow.
            gap, livez = max(gateway.gaps) - noise, max(gateway.livez) - noise
            figures = f"{seconds:.3f} s, gap {gap:.3f} s, livez {livez:.3f} s"
            print(f"{path} {what}: {status}, {figures}", flush=True)
            if gap <= MOST_GAP_S and livez <= MOST_LIVEZ_S:
                break
        else:
            slow.append(f"{path} {what}: {figures}")
    assert not slow


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_memory_is_given_back(engine: ReadyEngine, limits: BodyLimits) -> None:
    """All of the worst bodies at once, after they were sent once for what is loaded and cached."""
    gateway = Gateway(create_app(SETTINGS, engine))
    keep_the_worst(gateway.app)
    bodies = [(path, json.dumps(body).encode()) for path, _, body in worst(limits)]
    assert len(bodies) >= 20
    for path, data in bodies:
        await gateway.post(path, data)
    keep_the_worst(gateway.app)
    before = resident_bytes()
    await asyncio.gather(*[gateway.post(path, data) for path, data in bodies])
    await asyncio.sleep(0.1)
    assert resident_bytes() < MOST_GROWTH * before
