"""Run a model's program with its tests, in a process of its own with limits.

This contains accidents: endless loops, memory that grows without bound, files, processes, output.
It is not a sandbox against malice. The program runs as the same user, can read what that user can,
and has the network. Run code of a model that you do not trust in a container or virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.quality.child import PASSED, RAISED, WRONG

Outcome = Literal["passed", "wrong", "raised", "timeout", "killed"]
_OUTCOMES: dict[int, Outcome] = {PASSED: "passed", WRONG: "wrong", RAISED: "raised"}
_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What one program may use. It may start no further process."""

    cpu_seconds: int = 5
    wall_seconds: float = 60.0  # far more than the CPU seconds, as the machine may be busy
    address_space: int = 1 << 30  # bytes
    file_size: int = 1 << 20  # bytes of any one file


def run_program(source: str, limits: ProcessLimits = ProcessLimits()) -> Outcome:
    """Run `source` and return its outcome; nothing that the program does raises here.

    `wrong` is a failed assertion and `raised` any other exception, SystemExit included. `killed` is
    a signal of the kernel at a limit, such as that of CPU time, or an exit that bypasses Python.
    """
    with tempfile.TemporaryDirectory(prefix="aerie-quality-") as folder:
        line = [sys.executable, "-I", str(_CHILD), str(limits.cpu_seconds)]
        process = subprocess.Popen(
            [*line, str(limits.address_space), str(limits.file_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PATH": os.defpath},
            close_fds=True,
            process_group=0,
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                # A program with surrogates fails in the child, not here.
                stdin.write(source.encode("utf-8", "surrogatepass"))
            ended = _ends_within(process.pid, limits.wall_seconds)
        finally:
            # Before the leader is reaped: until then its group's id cannot be reused.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return _OUTCOMES.get(code, "killed") if ended else "timeout"


def _ends_within(pid: int, seconds: float) -> bool:
    """Wait for a child to end without reaping it."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))
    finally:
        os.close(descriptor)
