"""The engine's life: start, prove, serve, stop. Its phase is what /readyz tells."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import psutil

from app.engine.cpu import cpu_machine, preload
from app.engine.load import Load
from app.engine.options import VLLM_VERSION, engine_options
from app.engine.proof import WARM_UP_TOKENS, check_drafts, check_reports
from app.engine.steering import Steering, fingerprint
from app.errors import AerieError, ApiError, StartupError
from app.settings import Settings

if TYPE_CHECKING:
    from app.engine.adapter import Adapter
    from app.engine.llm import GatewayLLM
    from app.engine.operation import Operation
    from app.engine.steps import StepWatch

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 60.0
SHUTDOWN_TIMEOUT_S = 10.0
WATCH_INTERVAL_S = 0.5


class Phase(StrEnum):
    """Where the engine is in its life, in order."""

    STARTING = "starting"  # importing vllm
    LOADING = "loading"  # engine processes, weights, compilation
    WARMING = "warming"  # warm-up request, proof of drafting
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class Engine:
    """One vLLM engine with its operations. Everything happens on the event loop's thread
    but the blocking construction of the engine."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.failure: AerieError | None = None
        self.ended = asyncio.Event()
        self.load = Load()
        self.drafter: dict[str, Any] | None = None
        self.steering: Steering | None = None
        self._launching = False
        self._llm: GatewayLLM | None = None
        self._adapter: Adapter | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.phase is Phase.READY and self._llm is not None and not self._llm.errored

    def operation(self, name: str) -> Operation:
        """The operation to answer a request with. Raises ApiError 503 while there is none."""
        if not self.ready or self._adapter is None:
            raise self._not_ready()
        return self._adapter.operations[name]

    def steered(self) -> Steering:
        """The hand on K. Raises ApiError 503 while there is none."""
        if not self.ready or self.steering is None:
            raise self._not_ready()
        return self.steering

    def _not_ready(self) -> ApiError:
        return ApiError(
            503,
            f"The engine is not ready ({self.phase}).",
            code="engine_not_ready",
            headers={"Retry-After": "5"},
        )

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens; None before the engine is up."""
        return self._llm.model_config.max_model_len if self._llm is not None else None

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Bring the engine up to READY and watch it until `stop`. If it cannot start, or dies,
        the phase is FAILED, `failure` says why and `ended` is set."""
        try:
            await self._start()
            on_ready()
            polling = asyncio.create_task(self._poll())
            try:
                await self._watch()
            finally:
                polling.cancel()
        except Exception as error:
            if self.phase is not Phase.STOPPING:
                self._fail(error)

    async def _poll(self) -> None:
        if self.steering is not None:
            with contextlib.suppress(Exception):  # of a dying engine, which _watch will notice
                await self.steering.poll()

    async def _watch(self) -> None:
        while self.phase is Phase.READY:
            if self._llm is not None and self._llm.errored:
                raise StartupError("the engine died while serving; the cause is in the log above")
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _enter(self, phase: Phase) -> None:
        """Next phase, unless the end has begun meanwhile."""
        if self.phase is Phase.STOPPING:
            raise StartupError("stopped while starting")
        self.phase = phase

    def _fail(self, error: Exception) -> None:
        logger.debug("engine failed", exc_info=error)
        self.phase = Phase.FAILED
        self.failure = error if isinstance(error, AerieError) else StartupError(_reason(error))
        self.ended.set()

    async def _start(self) -> None:
        self._launching = True
        try:
            llm, steps = await asyncio.to_thread(self._launch)
            self._llm = llm
        finally:
            self._launching = False
        self._enter(Phase.WARMING)
        from app.engine.adapter import Adapter

        reports = await llm.collective_rpc("aerie_drafter_report", timeout=RPC_TIMEOUT_S)
        self.drafter = check_reports(self.settings, reports)
        adapter = Adapter(llm, self.settings)
        await asyncio.to_thread(adapter.warm_up)
        await llm.occupy(1, WARM_UP_TOKENS)
        drafted = await check_drafts(self.settings, steps)
        if self.drafter is not None:
            logger.info("drafting proven: %s drafted %d tokens", self.drafter["head"], drafted)
            self.steering = Steering(llm, self.settings, fingerprint(self.settings, _versions()))
            await self.steering.begin(self.load.capacity)
        self._adapter = adapter
        self._enter(Phase.READY)

    def _launch(self) -> tuple[GatewayLLM, StepWatch]:
        """Blocking: import vllm, build the engine's configuration, start its processes."""
        # The engine's processes inherit this thread's mask: Ctrl-C in a terminal reaches the
        # whole group, and it must drain the gateway rather than kill the engine under it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # An allowed host could send the gateway on to one that is not.
        os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        _check_version()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform

        from app.engine.llm import GatewayLLM
        from app.engine.steps import StepWatch

        self._enter(Phase.LOADING)
        machine = cpu_machine() if current_platform.is_cpu() else None
        if machine is not None:
            os.environ["LD_PRELOAD"] = preload(os.environ)
            if not machine.can_compile:
                logger.warning("no C++ compiler with Python.h: not compiled, slower")
        try:
            arguments = AsyncEngineArgs(**engine_options(self.settings, machine))
            config = arguments.create_engine_config()
        except TypeError as error:
            raise StartupError(f"engine_args: {error}") from error
        self.load.clear()
        scheduler, parallel = config.scheduler_config, config.parallel_config
        self.load.capacity = scheduler.max_num_seqs * parallel.data_parallel_size
        steps = StepWatch(load=self.load)
        llm = GatewayLLM.from_vllm_config(config, stat_loggers=[lambda *_: steps])
        return llm, steps

    async def stop(self) -> None:
        """End the engine's processes, also while they start. Running requests are aborted."""
        self.phase = Phase.STOPPING
        while self._launching:  # that thread waits for its processes: end them, and it ends
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(0.1)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:  # or it reports the engine's end as a death
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_TIMEOUT_S)


def _versions() -> dict[str, str]:
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "vllm": vllm.__version__}


def _check_version() -> None:
    import vllm

    if not vllm.__version__.startswith(VLLM_VERSION):
        raise StartupError(
            f"vllm {vllm.__version__} is installed, this gateway is made for {VLLM_VERSION}: "
            "run `make install`"
        )


def _reason(error: BaseException) -> str:
    """One line for the operator, from the innermost cause that says something."""
    text = str(error).strip() or type(error).__name__
    return text if len(text) <= 2000 else text[:2000] + " ..."
