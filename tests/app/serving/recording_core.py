"""A gateway whose engine core is a stand-in. vLLM's own classes run, from the HTTP body to the last
object before the core's process, and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from app.admission.limiter import MemoryLimiter
from app.engine.supervisor import Phase
from app.main import create_app
from app.serving.adapter import Adapter
from app.settings import load
from tests.app.keys_file import tenant
from tests.app.phased_engine import PhasedEngine
from tests.app.scripted_engine import logprobs_of
from tests.clock import Clock

CONTEXT = 128
MESSAGES = [{"role": "user", "content": "hi"}]


class RecordingCore:
    """Keeps every request, and answers each with one token once it may go."""

    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.resources = SimpleNamespace(engine_dead=False)
        self.go = asyncio.Event()
        self.go.set()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    def answer(self, request: EngineCoreRequest) -> EngineCoreOutput:
        """What becomes of the newest request."""
        return one_token(request, 5)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.requests.append(request)
        await self.go.wait()
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[self.answer(request)]))

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """They have ended."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""


def one_token(request: EngineCoreRequest, token: int) -> EngineCoreOutput:
    """An answer of one token, with the log probabilities that the request asks for."""
    answer = EngineCoreOutput(request.request_id, [token], finish_reason=FinishReason.LENGTH)
    params = request.sampling_params
    if params is not None and params.logprobs is not None:
        answer.new_logprobs = logprobs_of([token], params.logprobs)
    return answer


# Makes the gateway's end of an engine core, in the running event loop: `connect` in conftest.py.
Connect = Callable[..., Adapter]


@asynccontextmanager
async def gateway(
    adapter: Adapter, limits: str = "", *, guarded: bool = True, **given: str
) -> AsyncIterator[Any]:
    """Sends a body to a path with the key of tenant `one` or `two`, which have the limits."""
    if guarded:
        given["keys"] = tenant("one", "one", limits) + tenant("two", "two", limits)
    settings = load(given, {}, preset="embedded")
    engine = PhasedEngine(settings)
    engine.phase, engine._adapter, engine.load.capacity = Phase.READY, adapter, 64
    engine._max_model_len = CONTEXT
    app = create_app(settings, engine)
    app.state.admission.limiter = MemoryLimiter(Clock())  # no bucket fills by itself
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", timeout=60
    ) as client:

        async def post(path: str, key: str, **body: Any) -> httpx.Response:
            return await client.post(path, json=body, headers={"x-api-key": key})

        yield post
