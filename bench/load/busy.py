"""A disturbance: another busy program on the machine of the server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

from drafters.parent_death import end_with_parent


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that computes without end, in a session of its own, like another terminal's.
    Call it in the main thread: the process ends with the thread that started it (Linux)."""
    command = [sys.executable, "-c", "while True: pass"]
    process = subprocess.Popen(
        command, start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid())
    )
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()
