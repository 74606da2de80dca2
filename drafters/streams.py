"""Standard output and error that never raise: no request is to fail for a line of the log.

On a full disk, or into a pipe whose reader has gone, a write raises; so does a later flush of what
stayed in the buffer, and `multiprocessing` flushes before it starts a process and when one ends.
A progress bar could stop the loading of a model, and a line of the log the restart of an engine.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys


class Unfailing(io.TextIOWrapper):
    """A text stream that drops what cannot be written."""

    def write(self, text: str, /) -> int:
        """Write as much of `text` as there is room for; returns the length of all of it."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer; what cannot be written is dropped."""
        with contextlib.suppress(OSError):
            super().flush()


def open_missing() -> None:
    """Open /dev/null in place of the standard streams that whoever started this process has closed.

    Python has None for them, to which libraries write, and the next files and sockets get their
    numbers. Call it before anything else is opened."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open


def unfailing() -> None:
    """Make this process's standard output and error `Unfailing`, except where something else has
    replaced them. Safe to call more than once."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or stream.fileno() != number:
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - for the process's life
        how = {"encoding": stream.encoding, "errors": stream.errors, "write_through": True}
        setattr(sys, name, Unfailing(raw, **how))  # type: ignore[arg-type]
