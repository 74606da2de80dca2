"""Standard output and error that cannot fail: what is written there is worth no request.

On a full disk, or into a pipe whose reader has gone, a write raises; so does a later flush of what
stayed in the buffer, and `multiprocessing` flushes before it starts a process and when one ends.
A progress bar would end the loading of a model, and a line of the log the restart of an engine.
"""

from __future__ import annotations

import contextlib
import io
import sys


class Unfailing(io.TextIOWrapper):
    """Text into a file, as far as it can be written."""

    def write(self, text: str, /) -> int:
        """All of it, or as much as there was room for."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back: what could not be written is gone."""
        with contextlib.suppress(OSError):
            super().flush()


def unfailing() -> None:
    """Replace this process's standard output and error, unless something else has. Safe to call
    more than once."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or stream.fileno() != number:
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - for the process's life
        how = {"encoding": stream.encoding, "errors": stream.errors, "write_through": True}
        setattr(sys, name, Unfailing(raw, **how))  # type: ignore[arg-type]
