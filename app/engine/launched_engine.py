"""One engine, from the launch of its processes until nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from app.engine.configuration.runner import Blame, StartPath
from app.engine.hang_detector import HangDetector
from app.engine.launch import launch
from app.engine.process_cleanup import ProcessCleanup, started_processes
from app.engine.start_failure import EngineErrors, StartFailureError, start_failure
from app.errors import StartupError
from app.llm.engine_load import EngineLoad
from app.settings import Settings

if TYPE_CHECKING:
    from app.llm.async_llm import GatewayLLM
    from app.llm.steps import StepWatch

SHUTDOWN_TIMEOUT_S = 10.0
WATCH_INTERVAL_S = 0.2
# An engine whose worker failed ends soon, or never: the engine core waits for its first worker,
# which waits for the one that failed. How long it may take, while it loads and while it serves.
FAILED_LOAD_S, FAILED_STEP_S = 30.0, 10.0
DIED, HUNG = "died", "hung"


class LaunchedEngine:
    """The processes of one engine, vLLM's client of them, and the files that they would leave.

    `launcher` is the thread that starts the processes: they end with it. Everything else runs on
    the event loop's thread.
    """

    def __init__(self, launcher: ThreadPoolExecutor) -> None:
        self.llm: GatewayLLM | None = None  # until the model is loaded, and again from its end on
        self.files: set[Path] = set()  # that were seen while it started
        self._steps: StepWatch | None = None
        self._launcher = launcher
        self._launching = False
        self._running = started_processes()  # before it, which are not its own
        self._errors = EngineErrors()
        self._cleanup: ProcessCleanup | None = None

    @property
    def serves(self) -> bool:
        """Whether it is up and can take requests."""
        return self.llm is not None and not self.llm.errored

    @property
    def running(self) -> tuple[GatewayLLM, StepWatch]:
        """vLLM's client and its counts of steps, once the model is loaded."""
        assert self.llm is not None and self._steps is not None
        return self.llm, self._steps

    async def launch(
        self,
        settings: Settings,
        load: EngineLoad,
        path: StartPath,
        wish: bool | None,
        *,
        timeout_s: float | None,
    ) -> None:
        """Start the processes and load the model (app/engine/launch.py).

        Raises StartFailureError if that takes longer than `timeout_s`, or goes on after a process
        has reported an error, and whatever vLLM raises.
        """
        self._launching = True
        try:
            loop = asyncio.get_running_loop()
            launching = loop.run_in_executor(self._launcher, launch, settings, load, path, wish)
            await self._wait_for(launching, math.inf if timeout_s is None else timeout_s)
            hung = not launching.done()
            # That thread waits for its processes: end them, and it ends.
            while not launching.done():
                await asyncio.to_thread(ProcessCleanup(self._started()).run)
                await asyncio.wait({launching}, timeout=0.1)
            try:
                self.llm, self._steps = launching.result()
            except Exception as error:
                if not hung:
                    raise
                limit = f" within {timeout_s:g} s" if timeout_s is not None else ""
                message = f"the engine did not load{limit}"
                raise StartFailureError(message, Blame.RUNNER, HUNG) from error
            self._cleanup = ProcessCleanup(self.llm.processes)
        finally:
            self._launching = False

    async def _wait_for(self, launching: asyncio.Future[Any], timeout_s: float) -> None:
        """Wait until a launch has ended, for `timeout_s`, or for FAILED_LOAD_S after an error."""
        deadline, failed = time.monotonic() + timeout_s, False
        while not launching.done() and time.monotonic() < deadline:
            await asyncio.wait({launching}, timeout=WATCH_INTERVAL_S)
            if not failed and self._errors.first() is not None:
                failed, deadline = True, min(deadline, time.monotonic() + FAILED_LOAD_S)

    def _started(self) -> set[int]:
        return started_processes() - self._running

    def record(self) -> None:
        """Record its present processes and files, to be removed at its end."""
        if self._cleanup is not None:
            self._cleanup.record()

    async def end_of(self, hang_timeout_s: float, stopping: asyncio.Event) -> str:
        """Wait until it has ended or is `stopping`, which returns DIED, or hangs, which returns
        HUNG: one of its copies (data-parallel) made no output for `hang_timeout_s` while requests
        ran on it. One that hangs after an error in a process has DIED, after FAILED_STEP_S."""
        llm, steps = self.running
        hang_detectors = {
            rank: HangDetector(hang_timeout_s, 2 * WATCH_INTERVAL_S) for rank in llm.unfinished
        }
        while not (llm.errored or stopping.is_set()):
            for rank, requests in llm.unfinished.items():
                detector = hang_detectors[rank]
                hung = detector.hung(requests, steps.outputs[rank])
                if (hung or detector.silent_s >= FAILED_STEP_S) and self.fatal_error():
                    return DIED
                if hung:
                    return HUNG
            await asyncio.sleep(WATCH_INTERVAL_S)
        return DIED

    def fatal_error(self) -> str | None:
        """What ended it while it served; None if its processes reported nothing."""
        report = self._errors.fatal()
        return None if report is None else report.message

    def start_failure(self, error: Exception) -> StartupError:
        """The failure of its start, which raised `error`: with what its processes say."""
        if self.llm is None:  # vLLM gave its processes up
            self._cleanup = ProcessCleanup(self._started(), self.files)
        elif self.llm.errored and not isinstance(error, StartupError):
            error = ended_warming_up(DIED)  # a call into it only says that it has gone
        return start_failure(error, self._errors.first())

    async def bury(self) -> None:
        """End the requests on it, kill its processes and remove the files that they leave."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.mark_failed()
            self._cleanup = self._cleanup or ProcessCleanup(llm.processes)
        await self._clean_up()
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_TIMEOUT_S)
        self._errors.remove()

    async def stop(self) -> None:
        """End the requests on it, and let its processes end, also while they start."""
        while self._launching:  # that thread waits for its processes: end them, and it ends
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(0.1)
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.mark_failed()  # so that nobody waits for its answers
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_TIMEOUT_S)
        await self._clean_up()
        self._errors.remove()

    async def _clean_up(self) -> None:
        cleanup, self._cleanup = self._cleanup, None
        if cleanup is not None:
            await asyncio.to_thread(cleanup.run)


def ended_warming_up(how: str) -> StartFailureError:
    """The failure of an engine that died or hung before it was ready."""
    kind = HUNG if how == HUNG else "ended"
    return StartFailureError(f"the engine {how} while it warmed up", Blame.RUNNER, kind)
