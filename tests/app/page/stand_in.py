"""The gateway on a real port, with a scripted engine behind vLLM's serving classes.

What the engine "generates" depends on the prompt, comes step by step with drafts accepted, is slow
enough to be watched, and is counted in metrics with vLLM's names. It can be killed, comes back, and
its policy does what PATCH /v1/speculation says.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, Counter, Gauge
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from app.endpoints import declared
from app.engine.heads.drafts import DraftsByGeneration
from app.engine.supervisor import Phase
from app.main import create_app
from app.serving.adapter import Adapter
from app.settings import load
from drafters.config import HEAD, MAX_K, SOURCES
from tests.app.phased_engine import PhasedEngine
from tests.app.scripted_engine import ScriptedEngine

K_MAX = 5
STEP_S = 0.02
SAY = "Say:"  # a prompt that begins so is answered by its rest
REPEAT = "Repeat"  # a prompt that begins so is drafted for by all sources in turn
ANSWER = (
    "def is_palindrome(text: str) -> bool:\n"
    '    """Whether a text reads the same backwards."""\n'
    "    letters = [c.lower() for c in text if c.isalnum()]\n"
    "    return letters == letters[::-1]\n"
)

# Registered by each gateway: an engine that ends in this process unregisters all of vLLM's names.
RUNNING = Gauge("vllm:num_requests_running", "As vLLM's.", registry=None)
OUTPUT = Counter("vllm:generation_tokens", "As vLLM's.", registry=None)
DRAFTED = Counter("vllm:spec_decode_num_draft_tokens", "As vLLM's.", registry=None)
ACCEPTED = Counter("vllm:spec_decode_num_accepted_tokens", "As vLLM's.", registry=None)
METRICS = (RUNNING, OUTPUT, DRAFTED, ACCEPTED)


class StandInLlm(ScriptedEngine):
    """One request at a time is exact; the policy's K bounds what is drafted."""

    def __init__(self, policy: StandInSpeculation) -> None:
        super().__init__()
        self.policy = policy
        self.step_s = STEP_S
        self.dead = asyncio.Event()

    @property
    def errored(self) -> bool:  # type: ignore[override]
        return self.dead.is_set()

    async def _steps(
        self, processor: Any, queue: Any, usage: Any, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        said = self.prompts[-1].rpartition("user\n")[2].partition("<|im_end|>")[0]
        _, asked, rest = said.partition(SAY)
        self.script = rest.strip() if asked else ANSWER
        self.sources = SOURCES if said.startswith(REPEAT) else (HEAD,)
        limit = (params.extra_args or {}).get(MAX_K, K_MAX)
        self.k = min(limit, self.policy.values["k"])
        self.steps = (4, 1, 6, 2, 3) if self.k else (1,)
        drafted = accepted = 0
        RUNNING.inc()
        try:
            async for output in super()._steps(processor, queue, usage, params):
                if self.dead.is_set():
                    raise EngineDeadError()
                counts = self.counts[0]
                made = sum(j * n for j, n in enumerate(counts.histogram))
                DRAFTED.inc(counts.num_draft_tokens - drafted)
                ACCEPTED.inc(made - accepted)
                drafted, accepted = counts.num_draft_tokens, made
                OUTPUT.inc(sum(len(choice.token_ids) for choice in output.outputs))
                yield output
                await asyncio.sleep(self.step_s)
        finally:
            RUNNING.dec()


class StandInSpeculation:
    """The policy's end of /v1/speculation."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"objective": "throughput", "k": K_MAX, "tpot_s": None}
        self.available_sources = ["head", "lookup", "grammar"]
        self.drafts_off = False  # whether no request may have drafts
        self.drafts = DraftsByGeneration()

    def latest(self) -> dict[str, Any]:
        """What the policy would say."""
        chances = [0.81, 0.62, 0.47, 0.33, 0.24]
        return {
            **self.values,
            "batch_k": 0 if self.drafts_off else self.values["k"],
            "k_max": K_MAX,
            "why": "K = 5: 81% of the first drafts are accepted",
            "available_sources": self.available_sources,
            "requests": 1,
            "waiting": 0,
            "speedup": {"1m": 1.62, "5m": 1.58, "15m": None},
            "acceptance": [
                {"position": i + 1, "conditional": chance, "cumulative": chance, "trials": 412.0}
                for i, chance in enumerate(chances)
            ],
        }

    async def state(self) -> dict[str, Any]:
        return self.latest()

    async def steer(self, changes: dict[str, Any]) -> dict[str, Any]:
        self.values.update(changes)
        if self.values["objective"] == "off":
            self.values["k"] = 0
        return self.latest()


class StandInEngine(PhasedEngine):
    """Ready when it is told to be."""

    llm: StandInLlm

    def begin(self) -> None:
        """An engine that serves."""
        self.speculation = self.policy  # type: ignore[assignment]
        self.llm = StandInLlm(self.policy)
        self._adapter = Adapter(self.llm, self.settings, declared())  # type: ignore[arg-type]
        self._max_model_len = 2048
        self.phase = Phase.READY

    def kill(self) -> None:
        """The engine dies, and is being started again."""
        self.llm.dead.set()
        self.phase = Phase.RESTARTING

    async def run(self, on_ready: Callable[[], None]) -> None:
        self.policy = StandInSpeculation()
        self.begin()


class StandInGateway:
    """A gateway in a thread, on a port that the system chose."""

    def __init__(self, **settings: str) -> None:
        tree = load(settings, {}, preset="embedded")
        self.engine = StandInEngine(tree)
        self.app = create_app(tree, self.engine)
        config = uvicorn.Config(
            self.app, port=0, log_level="error", lifespan="on", timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> StandInGateway:
        for metric in METRICS:
            with contextlib.suppress(ValueError):  # another gateway registered it
                REGISTRY.register(metric)
        self._thread.start()
        while not (self._server.started and self.engine.ready):
            time.sleep(0.01)
        (socket,) = self._server.servers[0].sockets
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
