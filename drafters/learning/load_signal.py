"""How many requests the gateway is answering, told to the learner by a file of 24 bytes.

The gateway writes it when the first request comes or the last one goes, and every second. The
learner reads it every few hundredths of a second, which takes microseconds and no call into the
gateway.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

NAME = "load"
RENEWED_S = 1.0  # the gateway writes at least this often
GONE_S = 60.0  # no gateway that lives is silent for so long
STARTING = -1  # in the place of a number of requests: the engine starts, or there is none
_LAYOUT = struct.Struct("<dqq")  # when, the gateway's process id, requests


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

    @property
    def activity(self) -> Activity:
        """What the gateway does now.

        A gateway that has not written for a while is gone if it has no process, which says nothing
        while it writes: it may run in another container. If it is there, it may be starved, and is
        not idle.
        """
        silent_s = abs(time.monotonic() - self.at)  # the machine may have been started anew
        silent = silent_s >= 3 * RENEWED_S
        if silent and (silent_s > GONE_S or not _alive(self.pid)):
            return Activity.IDLE
        if self.requests == STARTING:
            return Activity.STARTING
        return Activity.BUSY if silent or self.requests else Activity.IDLE


class LoadSignal:
    """The gateway's end: writes the file, which it makes for its owner alone."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(folder / NAME, flags, 0o600)
        self._clock = clock

    def write(self, requests: int) -> None:
        """Say that so many requests are being answered, or STARTING. Raises OSError."""
        os.pwrite(self._file, _LAYOUT.pack(self._clock(), os.getpid(), requests), 0)

    def close(self) -> None:
        """Close the file, which stays."""
        os.close(self._file)


def read(folder: Path) -> GatewayLoad | None:
    """What the gateway last said; None if there is no gateway yet."""
    try:
        content = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return None
    return GatewayLoad(*_LAYOUT.unpack(content)) if len(content) == _LAYOUT.size else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
