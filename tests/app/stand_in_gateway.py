"""A gateway as `aerie serve` runs it, but for vLLM: its engine is two processes that are stuck.

The engine core sends the test what it is once there is something that could be left behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from app.engine import launched_engine, supervisor
from app.engine.configuration.runner import StartPath
from app.engine.launch import block_terminal_signals
from app.engine.supervisor import Engine, Phase
from app.errors import AerieError, ApiError, EngineLostError
from app.llm.first_token import FirstToken
from app.server import run
from app.settings import load
from app.validation.output_limit import OutputLimit
from drafters.parent_death import children_end_with_this_process

FORK = multiprocessing.get_context("fork")
TO_TEST: Connection
STAGE: str  # start, calibration or serving


def stuck() -> None:
    """In native code that keeps the interpreter's lock, with a handler for SIGTERM as vLLM's."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    ctypes.PyDLL(None).sleep(600)


def core() -> None:
    segment = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # as if it were killed as well
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tempfile.gettempdir()}/socket")
    Path(tempfile.gettempdir(), "part-of-a-compilation.s").write_text("")
    worker = FORK.Process(target=stuck)
    worker.start()
    TO_TEST.send({"core": os.getpid(), "worker": worker.pid, "segment": segment.name})
    stuck()


class StandInLLM:
    """What the supervisor asks of vLLM's client."""

    unfinished = MappingProxyType({0: 0})
    output_handler = None
    model_config = SimpleNamespace(max_model_len=2048, is_multimodal_model=False)

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self.processes = [process.pid]

    @property
    def errored(self) -> bool:
        return not self.process.is_alive()

    def mark_failed(self) -> None:
        pass

    def shutdown(self, timeout: float) -> None:
        self.process.terminate()
        self.process.join(0.2)
        self.process.kill()
        self.process.join()


def prepare() -> bool:
    block_terminal_signals()
    return True  # on a CPU


def launch(settings: Any, load: Any, path: StartPath, wish: bool | None) -> Any:
    with children_end_with_this_process():
        process = FORK.Process(target=core)
        process.start()
    if STAGE == "start":  # vLLM waits for its processes, and raises if one of them ends
        process.join()
        raise RuntimeError("the engine core ended while it started")
    return StandInLLM(process), SimpleNamespace(outputs=Counter())


class StandInOperation:
    """A stream that has its first token only if the request asks for one, and then goes on until
    the supervisor has given the engine up: before that, a drain would be through without it."""

    output_limit = OutputLimit()

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def __call__(self, payload: dict[str, Any], size: int = 0) -> Any:
        first = FirstToken(True) if payload["prompt"] == "decode" else FirstToken()
        TO_TEST.send("asked")
        return SimpleNamespace(answer=self.events(first), first=first)

    async def events(self, first: FirstToken) -> AsyncGenerator[str, None]:
        while self.engine.phase not in (Phase.FAILED, Phase.STOPPING):
            if first.settled:
                yield "data: {}\n\n"
            await asyncio.sleep(0.1)

    def failure(self, error: BaseException, *_: Any) -> ApiError:
        return ApiError(500, str(error))

    def event(self, error: ApiError, sequence_number: int) -> str:
        return f"data: {json.dumps(error.envelope())}\n\n"


class StandInEngine(Engine):
    async def _check_readiness(self, path: StartPath) -> None:
        if STAGE == "calibration":  # vLLM leaves calls into an engine that ended unanswered
            await asyncio.Event().wait()
        self._enter(Phase.READY)

    def operation(self, name: str) -> Any:
        return StandInOperation(self)


def serve(
    to_test: Connection, temporary: str, stage: str, port: int, drain_s: int, hang_ups: bool
) -> None:
    """Be a gateway in this process, which the import of this module has made ready. Without
    `hang_ups` it is one that ignores SIGHUP from the start, as under `nohup`."""
    global TO_TEST, STAGE
    TO_TEST, STAGE = to_test, stage
    os.setpgid(0, 0)
    os.environ["TMPDIR"], tempfile.tempdir = temporary, None
    if not hang_ups:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    supervisor.prepare, launched_engine.launch = prepare, launch
    run.Engine = StandInEngine  # type: ignore[misc]
    options = {"port": str(port), "drain_timeout_s": str(drain_s), "max_restarts": "0"}
    try:
        run.serve(load(options, {}, preset="embedded"))
    except AerieError as error:
        print(f"aerie: {error}", file=sys.stderr)
        os._exit(3 if isinstance(error, EngineLostError) else 1)
    os._exit(0)
