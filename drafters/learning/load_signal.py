"""How many requests the gateway is answering, told to the learner by a file of 32 bytes.

The gateway writes it when the first request comes or the last one goes, and every second. The
learner reads it every few hundredths of a second, which takes microseconds and no call into the
gateway.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

NAME = "load"
RENEWED_S = 1.0  # the gateway writes at least this often
GONE_S = 60.0  # a silence after which a gateway whose process is not to be seen here is gone
STARTING = -1  # in the place of a number of requests: the engine starts, or there is none
_LAYOUT = struct.Struct("<dqqq")  # the fields of GatewayLoad
_LEAST_BYTES = struct.calcsize("<dqq")  # an earlier version's, without `started`
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat behind the name (proc_pid_stat(5))


class Activity(Enum):
    """What a gateway does, as far as a learner beside it cares."""

    IDLE = auto()  # it answers nothing, or there is none
    BUSY = auto()
    STARTING = auto()  # its engine starts: what it measures then must be measured alone


@dataclass(frozen=True)
class GatewayLoad:
    """What the gateway last said of its load."""

    at: float  # seconds of this machine's steady clock
    pid: int
    requests: int  # or STARTING
    started: int = 0  # when that process was started, in the kernel's ticks; 0: not known

    @property
    def activity(self) -> Activity:
        """What the gateway does now.

        A gateway that has not written for a while may be starved, or have a full disk: while its
        process is there, it is not idle. If no process has its id, it is gone, which says nothing
        while it writes: it may run in another container. If that is another process's id by now, or
        in this container, it is gone after GONE_S.
        """
        silent_s = abs(time.monotonic() - self.at)  # the machine may have been started anew
        silent = silent_s >= 3 * RENEWED_S
        if silent:
            started = start_of(self.pid)
            if started is None or (started != self.started and silent_s > GONE_S):
                return Activity.IDLE
        if self.requests == STARTING:
            return Activity.STARTING
        return Activity.BUSY if silent or self.requests else Activity.IDLE


class LoadSignal:
    """The gateway's end: writes the file, which it makes for its owner alone."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        # Emptied: what the gateway before said must not stand if nothing can be written.
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file = os.open(folder / NAME, flags, 0o600)
        self._clock = clock
        self._process = os.getpid()
        self._started = start_of(self._process) or 0
        # A start that fails leaves this, by whose process id a learner sees that the gateway has
        # ended. On a full disk the file stays empty, and the learner waits.
        with contextlib.suppress(OSError):
            self.write(STARTING)

    def write(self, requests: int) -> None:
        """Say that so many requests are being answered, or STARTING. Raises OSError."""
        content = _LAYOUT.pack(self._clock(), self._process, requests, self._started)
        os.pwrite(self._file, content, 0)

    def close(self) -> None:
        """Close the file, which stays."""
        os.close(self._file)


def read(folder: Path) -> GatewayLoad | None:
    """What the gateway last said; None if there is no gateway yet. Raises OSError, and ValueError
    for a file that is too short, as a first write that failed leaves it."""
    try:
        content = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _LEAST_BYTES:
        raise ValueError(f"{folder / NAME} has {len(content)} bytes")
    return GatewayLoad(*_LAYOUT.unpack(content[: _LAYOUT.size].ljust(_LAYOUT.size, b"\0")))


def start_of(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since the machine was; None if it is not
    there, or has ended and its parent has not noticed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # none, or hidden: another's
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[_STATE] in (b"Z", b"X") else int(fields[_STARTED])
