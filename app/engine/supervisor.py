"""Supervision of the engine: start, readiness checks, service, restarts, stop.

`/readyz` answers with the phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from app.background import BackgroundTask, is_being_cancelled
from app.endpoints import declared
from app.engine.configuration.head import WITHOUT_HEAD
from app.engine.configuration.runner import Blame, StartPath, runner_wish, start_plan
from app.engine.freeze_gc import freeze_gc
from app.engine.heads.generations import HeadGenerations
from app.engine.launch import prepare, versions
from app.engine.launched_engine import DIED, HUNG, LaunchedEngine, ended_warming_up
from app.engine.process_cleanup import files_in_use
from app.engine.readiness import check_acceptance, check_drafts, check_finite, check_reports
from app.engine.restart_policy import RestartPolicy
from app.engine.speculation_client import SpeculationClient, fingerprint
from app.engine.start_failure import Fallback, StartFailureError
from app.errors import AerieError, ApiError, StartupError
from app.llm.engine_load import EngineLoad
from app.observability import metrics
from app.settings import Settings
from drafters.learning.first_head import first_head, older_first_head

if TYPE_CHECKING:
    from app.learning.learning import Learning
    from app.serving.adapter import Adapter
    from app.serving.operation import Operation

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 60.0
RECORD_INTERVAL_S = 0.5
HEADS_STOP_S = 2.0  # how long the end waits for a file system that does not answer
FIRST_START_S = 30.0  # what clients are told to wait for before the first start
MAX_RETRY_AFTER_S = 60
# A restart may load for so many times as long as the first start took, and at least so long.
RELOAD_FACTOR, MIN_RELOAD_S = 3.0, 600.0


class Phase(StrEnum):
    """Phases of the engine, in order."""

    STARTING = "starting"  # importing vllm
    RESTARTING = "restarting"  # the engine is gone; then again from `loading` on
    LOADING = "loading"  # engine processes, weights, compilation
    WARMING = "warming"  # warm-up requests, readiness checks
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class Engine:
    """A supervised vLLM engine with its operations.

    Everything runs on the event loop's thread, except for the blocking launch of the engine.

    `record_files` is called again and again while the engine starts, in a thread. It gets all files
    that would be left if every process were killed: shared memory and sockets.
    """

    def __init__(
        self, settings: Settings, record_files: Callable[[Iterable[Path]], None] | None = None
    ) -> None:
        self.settings = settings
        self.path: StartPath | None = None  # None until the engine was ready
        self.fallback: Fallback | None = None
        self._record_files = record_files
        # Engine processes end with the thread that started them: this one lasts as long as they do.
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="engine-launch")
        self.phase = Phase.STARTING
        self.failure: AerieError | None = None
        self.ended = asyncio.Event()
        self.load = EngineLoad()
        self.learning: Learning | None = None  # set by the application, before `run`
        self.drafter: dict[str, Any] | None = None
        self.speculation: SpeculationClient | None = None
        self._ready_s = 0.0  # seconds of service, up to the engine's last end
        self._restart_policy = RestartPolicy(settings.supervision, lambda: self._ready_s)
        self._supervision = BackgroundTask("engine_watch", self._supervise, final=(AerieError,))
        self._polling = BackgroundTask("speculation_metrics", self._poll)
        self.heads: HeadGenerations | None = None
        if settings.learning.learn is not None:
            target, head = settings.model, str(settings.speculation.drafter)
            names = target.model, target.revision, head
            self.heads = HeadGenerations(
                Path(settings.learning.learn),
                partial(first_head, *names),
                older_first_head=partial(older_first_head, *names),
            )
        self._head_trials = BackgroundTask("head_generations", self._follow_heads)
        self.background: tuple[BackgroundTask, ...] = (self._supervision,)
        if settings.speculates:
            self.background += (self._polling,)
        if self.heads is not None:
            self.background += (self._head_trials,)
        # Schemas of request bodies, for the OpenAPI document (app/serving/schemas.py).
        self.schemas: tuple[dict[str, dict[str, Any]], dict[str, Any]] = ({}, {})
        self._max_model_len: int | None = None
        self.takes_media = False  # known once the engine was up
        self._stopping = asyncio.Event()
        self._wish: bool | None = None  # the model runner that the operator asked for
        self._launched: LaunchedEngine | None = None  # from its launch on
        self._adapter: Adapter | None = None
        self._back_at = time.monotonic() + FIRST_START_S
        self._start_s = FIRST_START_S

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.phase is Phase.READY and self._launched is not None and self._launched.serves

    @property
    def settings_in_force(self) -> Settings:
        """The settings of the path that the engine runs on; as given while there is none."""
        return self.settings if self.path is None else self.path.settings(self.settings)

    @property
    def retry_after_s(self) -> int:
        """Seconds until the engine may be ready, estimated from its last start."""
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._back_at - time.monotonic())))

    def operation(self, name: str) -> Operation:
        """The operation to answer a request with. Raises ApiError 503 while there is none."""
        if not self.ready or self._adapter is None:
            raise self._not_ready()
        return self._adapter.operations[name]

    def running_speculation(self) -> SpeculationClient:
        """The client of the policy that chooses K. Raises ApiError 503 while there is none."""
        if not self.ready or self.speculation is None:
            raise self._not_ready()
        return self.speculation

    def _not_ready(self) -> ApiError:
        return ApiError(
            503,
            f"The engine is not ready ({self.phase}).",
            code="engine_not_ready",
            headers={"Retry-After": str(self.retry_after_s)},
        )

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens; None before the engine was up."""
        return self._max_model_len

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Bring the engine up to READY, call `on_ready`, and keep it there until `stop`.

        If it cannot start the first time, or dies too often, the phase is FAILED, `failure` says
        why and `ended` is set.
        """
        recording = asyncio.create_task(self._record_until_ready())
        try:
            self._start_s = await self._first_start()
            on_ready()
            await self._supervision.run()
        except (Exception, asyncio.CancelledError) as error:
            if is_being_cancelled():
                raise
            if self.phase is not Phase.STOPPING:
                self._fail(error)
        finally:
            recording.cancel()

    async def _record_until_ready(self) -> None:
        """Record files until the engine is ready, and once more then; likewise when it restarts."""
        complete = False
        while True:
            ready = self.ready
            if not (ready and complete):
                with contextlib.suppress(psutil.Error):  # a process has ended meanwhile
                    files = await asyncio.to_thread(files_in_use)
                    if self._launched is not None:
                        self._launched.files |= files
                    if self._record_files is not None:
                        await asyncio.to_thread(self._record_files, files)
                    complete = ready
            await asyncio.sleep(RECORD_INTERVAL_S)

    async def _supervise(self) -> None:
        """Watch the engine and start it again, until `stop` or too many deaths.

        The task itself may be a restarted one: an engine that does not serve is then replaced.
        """
        while True:
            await self._restart(await self._watch() if self.ready else DIED)

    async def _watch(self) -> str:
        """Wait until the serving engine has ended; returns DIED or HUNG."""
        began = time.monotonic()
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self.speculation is not None:
                    await stack.enter_async_context(self._polling)
                if self.swappable_heads is not None:
                    await stack.enter_async_context(self._head_trials)
                ended = await self._end_of(self.settings.supervision.hang_timeout_s)
            if ended == HUNG:  # it served nobody in that time
                self._ready_s -= self.settings.supervision.hang_timeout_s
            return ended
        finally:
            self._ready_s += time.monotonic() - began

    async def _poll(self) -> None:
        assert self.speculation is not None
        await self.speculation.poll()

    async def _follow_heads(self) -> None:
        assert self.heads is not None
        await self.heads.run()

    @property
    def swappable_heads(self) -> HeadGenerations | None:
        """The generations of the head; None where no head learns, or the engine was started without
        its head."""
        return self.heads if self.settings_in_force.has_head else None

    def running_heads(self) -> HeadGenerations:
        """The generations of the head. Raises ApiError 503 while the engine is not ready, and 400
        where no head learns."""
        if not self.ready:
            raise self._not_ready()
        heads = self.swappable_heads
        if heads is None:
            message = "'generation': this gateway was started without --learn, or has no head."
            raise ApiError(400, message, param="generation")
        return heads

    async def _end_of(self, hang_timeout_s: float) -> str:
        assert self._launched is not None
        return await self._launched.end_of(hang_timeout_s, self._stopping)

    async def _restart(self, reason: str) -> None:
        """Restart the engine until it serves again. Raises EngineLostError if it died too often."""
        if reason == HUNG:
            timeout_s = self.settings.supervision.hang_timeout_s
            cause = f"it made no step for {timeout_s:g} s while requests ran"
        else:
            report = None if self._launched is None else self._launched.fatal_error()
            cause = "it died while serving" + (f": {report}" if report else "")
        while True:
            self._enter(Phase.RESTARTING)
            metrics.ENGINE_UP.set(0)
            self._back_at = time.monotonic() + self._start_s  # ending what is left takes a while
            await self._teardown()
            self._enter(Phase.RESTARTING)
            wait_s = self._restart_policy.next_delay_s(cause)
            metrics.ENGINE_RESTARTS.labels(reason).inc()
            logger.error("engine lost: %s; it is started again in %.1f s", cause, wait_s)
            self._back_at = time.monotonic() + wait_s + self._start_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
            try:
                assert self.path is not None
                took_s = await self._start(
                    self.path,
                    hang_timeout_s=self.settings.supervision.hang_timeout_s,
                    load_timeout_s=max(MIN_RELOAD_S, RELOAD_FACTOR * self._start_s),
                )
            except StartupError as error:
                self._enter(Phase.RESTARTING)
                hung = isinstance(error, StartFailureError) and error.reason == HUNG
                reason, cause = HUNG if hung else DIED, f"it did not start again: {error}"
            else:
                logger.info("ready again after %.1f s", took_s)
                return

    async def _teardown(self) -> None:
        """Bury the engine that has ended."""
        self._adapter = None
        self.load.clear()
        launched, self._launched = self._launched, None
        if launched is not None:
            await launched.bury()

    def _enter(self, phase: Phase) -> None:
        """Enter the next phase. Raises StartupError if `stop` was called meanwhile."""
        if self.phase is Phase.STOPPING:
            raise StartupError("stopped while starting")
        self.phase = phase
        if self.learning is not None:
            self.learning.load.serve(phase is Phase.READY)

    def _fail(self, error: BaseException) -> None:
        logger.debug("engine failed", exc_info=error)
        self.phase = Phase.FAILED
        self.failure = error if isinstance(error, AerieError) else StartupError(f"{error!r}")
        self.ended.set()

    async def _first_start(self) -> float:
        """Start the engine on the first path that works; returns the seconds that this path took.

        Raises StartupError if none does, or if no other path would cure what failed.
        """
        self._wish = runner_wish(os.environ)
        on_cpu = await asyncio.get_running_loop().run_in_executor(self._launcher, prepare)
        plan = start_plan(self.settings, on_cpu=on_cpu, wish=self._wish)
        path, failures = plan.first, list[str]()
        while True:
            logger.info("starting the engine with %s", path.description)
            try:
                took_s = await self._start(path)
            except StartupError as error:
                failures.append(f"{path}: {error}")
                following = None
                if isinstance(error, StartFailureError) and self.phase is not Phase.STOPPING:
                    following = plan.after(path, error.blame)
                    if following is not None:
                        self._fall_back(path, error, following)
                if following is None:
                    if len(failures) == 1:
                        raise
                    raise StartupError("no way to start works: " + "; ".join(failures)) from error
                await self._teardown()
                path = following
            else:
                self._take(path)
                return took_s

    async def _start(
        self,
        path: StartPath,
        *,
        hang_timeout_s: float = math.inf,
        load_timeout_s: float | None = None,
    ) -> float:
        """Start the engine on a path and check its readiness; returns the seconds that it took.

        The first start has no time limits unless a process fails: only then compilers run, which
        may take any time. Raises StartupError with what the engine's processes say, also if the
        engine ends or hangs, or on `stop`, whatever readiness waits for: vLLM leaves some calls
        into an engine that has ended unanswered.
        """
        began = time.monotonic()
        self._enter(Phase.LOADING)
        launched = self._launched = LaunchedEngine(self._launcher)
        try:
            settings = path.settings(self.settings)
            await launched.launch(settings, self.load, path, self._wish, timeout_s=load_timeout_s)
            llm, _ = launched.running
            llm.learning = self.learning
            self._max_model_len = llm.model_config.max_model_len
            self.takes_media = bool(llm.model_config.is_multimodal_model)
            self._enter(Phase.WARMING)
            await self._warm_up(path, hang_timeout_s)
        except Exception as error:
            logger.debug("engine did not start", exc_info=error)
            raise launched.start_failure(error) from error
        return time.monotonic() - began

    async def _warm_up(self, path: StartPath, hang_timeout_s: float) -> None:
        """Check the engine's readiness. Raises StartFailureError if it dies or hangs meanwhile."""
        readiness = asyncio.ensure_future(self._check_readiness(path))
        ending = asyncio.ensure_future(self._end_of(hang_timeout_s))
        try:
            await asyncio.wait({readiness, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not readiness.done():
                raise ended_warming_up(ending.result())
            readiness.result()
        finally:
            readiness.cancel()
            ending.cancel()
            await asyncio.gather(readiness, ending, return_exceptions=True)

    def _fall_back(self, path: StartPath, error: StartFailureError, following: StartPath) -> None:
        """Log why a path is left, and keep it as the reason of the fallback."""
        if error.blame is Blame.UNSUPPORTED:
            logger.warning("%s cannot run this: %s", path.description, error)
        else:
            logger.error("the engine does not start with %s: %s", path.description, error)
        logger.warning("starting once more with %s", following.description)
        if self.fallback is None or self.fallback.reason == "unsupported":
            self.fallback = Fallback(path, error.reason, str(error))

    def _take(self, path: StartPath) -> None:
        """Keep, export and log the path that works."""
        self.path = path
        reason = "none" if self.fallback is None else self.fallback.reason
        metrics.SPECULATION_PATH.labels(path, reason).set(1)
        if self.fallback is None:
            logger.info("speculation path: %s, %s", path, path.description)
        else:
            logger.warning("speculation path: %s, %s; %s", path, path.description, self.fallback)

    async def _check_readiness(self, path: StartPath) -> None:
        """Check that the engine does what the settings say; then requests are taken."""
        from app.serving.adapter import Adapter

        settings = path.settings(self.settings)
        assert self._launched is not None
        llm, steps = self._launched.running
        reports = await llm.collective_rpc("aerie_drafter_report", timeout=RPC_TIMEOUT_S)
        self.drafter = check_reports(settings, reports)
        adapter = Adapter(llm, settings, declared())
        await asyncio.to_thread(adapter.warm_up)
        self.schemas = adapter.schemas
        await check_finite(settings, llm)
        drafted = await check_drafts(settings, llm, steps)
        check_acceptance(settings, steps)
        if self.drafter is not None:
            what = self.drafter["head"] or "lookup"
            logger.info("drafting proven: %s drafted %d tokens", what, drafted)
            if not settings.has_head:
                logger.info("%s", WITHOUT_HEAD)
            if self.speculation is not None:
                await self.speculation.resume(llm)
            else:
                known = fingerprint(settings, {**versions(llm), "path": path})
                speculation = SpeculationClient(llm, settings, known)
                await speculation.begin(self.load.copy_capacity)
                self.speculation = speculation
            if self.heads is not None and settings.has_head:
                await self.heads.begin(self.speculation)
        self._launched.record()
        freeze_gc()
        self._adapter = adapter
        self._enter(Phase.READY)
        metrics.ENGINE_UP.set(1)

    async def stop(self) -> None:
        """End the engine's processes, also while they start. Running requests are aborted."""
        self.phase = Phase.STOPPING
        self._stopping.set()
        metrics.ENGINE_UP.set(0)
        if self._launched is not None:
            await self._launched.stop()
        if self.heads is not None:
            stopping = asyncio.ensure_future(asyncio.to_thread(self.heads.stopped))
            await asyncio.wait({stopping}, timeout=HEADS_STOP_S)
