"""A disturbance: another busy program on the machine of the server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that computes without end, in a session of its own, like another terminal's."""
    command = [sys.executable, "-c", "while True: pass"]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()
