"""A server as a child process, which is ended together with all processes that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from drafters.parent_death import request_death_signal

START_S, STOP_S, POLL_S = 900.0, 40.0, 0.25


class ServerError(RuntimeError):
    """A server did not start or has ended; the text ends with the last lines of its log."""


class Server:
    """One server process and its log."""

    def __init__(
        self, line: Sequence[str], environment: Mapping[str, str], port: int, log: Path
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                list(line),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # A process group, not a session: Linux divides a CPU between sessions (autogroups),
                # and 6.18 lets this client wait for seconds while an engine spins in another one.
                process_group=0,
                # A killed bench leaves no engine behind. The signal comes when the *thread* that
                # started the server ends; those of asyncio.to_thread last as long as the bench.
                preexec_fn=partial(request_death_signal, signal.SIGTERM),
            )

    def wait(self, path: str, timeout_s: float = START_S) -> Self:
        """Wait until `path` answers 200. Raises ServerError if the server ends or is too slow."""
        deadline = time.monotonic() + timeout_s
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            # Statuses of 400 and more raise HTTPError, which is an OSError too.
            with contextlib.suppress(OSError), opener.open(self.url + path, timeout=5):
                return self
            self.check()
            if time.monotonic() > deadline:
                raise ServerError(f"not ready after {timeout_s:.0f} s{self._tail()}")
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise ServerError if the process has ended."""
        if (code := self._process.poll()) is not None:
            raise ServerError(f"the server ended with code {code}{self._tail()}")

    def stop(self) -> None:
        """End the server with SIGTERM, then SIGKILL all that is left of its process group."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tail(self) -> str:
        lines = self._log.read_text("utf-8", errors="replace").splitlines()[-20:]
        return f"; {self._log} ends with:\n" + "\n".join(lines)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
