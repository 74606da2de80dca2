"""How many requests the gateway is answering, told to the learner by a file of 24 bytes.

The gateway writes it when the number changes and at least every second. The learner reads it every
few hundredths of a second, which takes microseconds and no call into the gateway.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NAME = "load"
RENEWED_S = 1.0  # the gateway writes at least this often
_LAYOUT = struct.Struct("<dqq")  # when, the gateway's process id, requests


@dataclass(frozen=True)
class Load:
    """What the gateway last said of its load."""

    at: float  # seconds since 1970
    pid: int
    requests: int

    def idle(self) -> bool:
        """Whether nothing is being answered: no request is there, or the gateway is gone.

        A gateway that is there and has not written for a while may be starved: it is not idle.
        """
        if not _alive(self.pid):
            return True
        return self.requests == 0 and time.time() - self.at < 3 * RENEWED_S


class LoadSignal:
    """The gateway's end: writes the file, which it makes for its owner alone."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(folder / NAME, flags, 0o600)
        self._clock = clock

    def write(self, requests: int) -> None:
        """Say that so many requests are being answered. Raises OSError."""
        os.pwrite(self._file, _LAYOUT.pack(self._clock(), os.getpid(), requests), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read(folder: Path) -> Load | None:
    """What the gateway last said; None if there is no gateway yet."""
    try:
        content = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return None
    return Load(*_LAYOUT.unpack(content)) if len(content) == _LAYOUT.size else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
