"""Cleanup after an engine that was killed: processes, shared memory, sockets (Linux).

The engine core's workers end when they notice that it has gone, unless they are stuck. Shared
memory of a killed process stays in /dev/shm, and its sockets in the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
END_TIMEOUT_S = 20.0


class ProcessCleanup:
    """Ends the processes of one engine and removes the files that only they used."""

    def __init__(self, processes: Iterable[int], files: Iterable[Path] = ()) -> None:
        """Record the engine's `processes` (their ids), their children, and the files of all.

        `files` may be left by processes of the engine that have ended already.
        """
        self._processes: list[psutil.Process] = []
        self._files: set[Path] = set(files)
        for pid in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(pid))
        self.record()

    def record(self) -> None:
        """Record the present processes and files: those of dead processes cannot be found."""
        known = {process.pid for process in self._processes}
        for process in list(self._processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                children = process.children(recursive=True)
                self._processes += [child for child in children if child.pid not in known]
                known |= {child.pid for child in children}
        for process in self._processes:
            self._files |= _files(process)
        self._files -= _files(psutil.Process())

    def run(self) -> None:
        """Kill the processes that still live, wait until they end, remove the files. Blocking."""
        running = [process for process in self._processes if process.is_running()]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # ends a stopped process, too
        if alive := _wait(running):  # in a system call that does not end: a driver's, most likely
            logger.error("processes of the engine cannot be killed: %s", [p.pid for p in alive])
            return
        removed = 0
        for file in self._files:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
                removed += 1
        if running or removed:
            logger.info(
                "killed %d processes of the engine, removed %d files", len(running), removed
            )


def started_processes() -> set[int]:
    """Ids of the processes that this one has started with `multiprocessing`, as vLLM does, and that
    still run. Those of `multiprocessing` itself, which outlast an engine, are not among them."""
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def files_in_use() -> set[Path]:
    """Shared memory and sockets of this process and all that it has started."""
    this = psutil.Process()
    return set().union(*map(_files, (this, *this.children(recursive=True))))


def _wait(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until the processes have ended; returns those that have not after END_TIMEOUT_S."""
    deadline = time.monotonic() + END_TIMEOUT_S
    alive = processes
    while (alive := [process for process in alive if not _ended(process)]) and (
        time.monotonic() < deadline
    ):
        psutil.wait_procs(alive, 0.1)  # asks for the exit statuses of children
    return alive


def _ended(process: psutil.Process) -> bool:
    """Whether a process has ended, a zombie included.

    Zombies stay where the first process of a container does not ask for exit statuses.
    """
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _files(process: psutil.Process) -> set[Path]:
    """Shared memory in a process's address space, and the sockets that it has bound.

    A model's weights may lie in /dev/shm too: they are mapped to be read only, or in a folder.
    """
    found: set[str] = set()
    with contextlib.suppress(OSError, psutil.Error):
        maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8", "surrogateescape")
        for line in maps.splitlines():
            fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, name
            is_named = len(fields) == 6 and not line.endswith("(deleted)")
            if is_named and fields[1] == "rw-s" and Path(fields[5]).parent == SHARED_MEMORY:
                found.add(fields[5])
        # Only the listening end of a socket has a name.
        found |= {socket.laddr for socket in process.net_connections("unix")}
    return {Path(name) for name in found if name.startswith("/")}
