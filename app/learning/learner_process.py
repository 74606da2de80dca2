"""The learner: a process beside the gateway that trains the head further."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from app.background import BackgroundTask
from drafters.packaged import is_packaged

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 600.0
STOP_S = 5.0  # how long it may take to end; then it is killed, which costs it no more than a step
HUNG_S = 2.0  # how long the gateway's end waits beyond that


def learner_command(
    folder: Path,
    target: str,
    revision: str | None,
    head: str,
    k: int,
    share: float,
    max_length: int,
    device: str,
) -> list[str]:
    """The command that trains the head for the target in the folder, for `k` draft tokens, until it
    is ended; under load for that share of the time, on `max_length` tokens of a sequence and on a
    torch device.

    Target and head are folders, hub ids whose files the engine has brought here, or a packaged
    target's name. Raises OSError if they are not here.
    """
    learner = ["drafters.train.learner", str(folder), "--target", _local(target, revision)]
    learner += ["--head", _local(head), "--k", str(k), "--forever"]
    learner += ["--share", str(share), "--max-length", str(max_length)]
    learner += ["--device", device]
    # -P: a module of the working directory is not to stand in for one of Python's.
    return [sys.executable, "-P", "-m", "drafters.parent_death", str(os.getpid()), *learner]


def _local(name: str, revision: str | None = None) -> str:
    """The folder of a model of the hub; another name stays."""
    if Path(name).is_dir() or is_packaged(name):
        return name
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, revision=revision, local_files_only=True))


class LearnerEndedError(Exception):
    """The learner ended, or could not be started."""


class LearnerProcess:
    """Keeps the learner running from `start` on: if it ends, that is logged and counted, and it is
    started again (app/background.py). Nothing else depends on it.

    It has no priority of its own: its parent has to stop the training within milliseconds, and the
    training itself is of lowest priority.
    """

    def __init__(self, command: Callable[[], Sequence[str]]) -> None:
        self._command = command  # asked for at each start
        self._start = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        # The learner ends with the thread that made it (drafters/parent_death.py).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aerie-learner")
        self._task = BackgroundTask(
            "learner", self._run_once, first_retry_s=FIRST_RETRY_S, max_retry_s=MAX_RETRY_S
        )

    def start(self) -> None:
        """Start the learner. Further calls do nothing."""
        self._start.set()

    @property
    def background(self) -> BackgroundTask:
        """The task that keeps it running."""
        return self._task

    @property
    def pid(self) -> int | None:
        """The learner's process id; None while there is none."""
        return None if self._process is None else self._process.pid

    async def __aenter__(self) -> Self:
        """Wait for `start` in a task of its own."""
        await self._task.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the learner within STOP_S seconds, and start it no more.

        One that hangs in a file system cannot be ended: it is not waited for beyond HUNG_S more.
        """
        self._stopping.set()
        if (process := self._process) is not None:  # the thread may set it to None meanwhile
            process.terminate()
        await self._task.__aexit__(kind, error, trace)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S + HUNG_S):
                await asyncio.to_thread(self._thread.shutdown)

    async def _run_once(self) -> None:
        await self._start.wait()
        how = await asyncio.get_running_loop().run_in_executor(self._thread, self._run)
        raise LearnerEndedError(how)

    def _run(self) -> str:
        """Run the learner; returns how it ended. Blocking."""
        if self._stopping.is_set():
            return "was not started"
        try:
            # In a group of its own, a terminal's Ctrl-C drains the gateway and does not end the
            # learner first. Not in a session: that may have the same share of the CPUs as all
            # others together, whatever its priority (sched(7), autogroup).
            process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0
            )
        except OSError as error:
            return f"cannot be started: {error}"
        self._process = process
        while not self._stopping.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.5)
                self._process = None
                return f"ended with code {code}"
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None
        return "was stopped"
