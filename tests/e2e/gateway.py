"""One gateway process, run as an operator would run it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from drafters.parent_death import request_death_signal
from tests.ports import reserved_port

MODEL = "aerie-embedded"
POLL_S = 0.1
# Hosting platforms kill what has not ended 30 s after SIGTERM.
STOP_WITHIN_S = 25.0
LEFTOVERS_WITHIN_S = 20.0  # they end at once, where they get a core
# What is asked of each gateway as soon as its port is bound: method, path, body.
TOO_EARLY: list[tuple[str, str, object]] = [
    (
        "POST",
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "stream": True}),
    ("GET", "/ping", None),
]


@contextlib.contextmanager
def without_drafts(http: httpx.Client) -> Iterator[None]:
    """Let a gateway draft nothing for a while."""
    http.patch("/v1/speculation", json={"objective": "off"}).raise_for_status()
    try:
        yield
    finally:
        http.patch("/v1/speculation", json={"objective": "throughput"}).raise_for_status()


def command() -> list[str]:
    """The installed console script that belongs to the running interpreter."""
    script = Path(sys.executable).with_name("aerie")
    assert script.exists(), f"{script} is missing: install the project into this environment first"
    return [str(script), "serve"]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Of a gateway. Steps are not measured at start-up unless a test asks for it: what K is
    chosen is the concern of few of them."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "AERIE_CALIBRATION_S": "0", **extra}


@dataclass
class Gateway:
    url: str
    log: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    bound_after_s: float | None = None
    ready_after_s: float | None = None
    # What clients saw before readiness, by request line.
    while_starting: dict[str, list[httpx.Response]] = field(default_factory=dict)

    @classmethod
    def attach(cls, url: str) -> Gateway:
        return cls(url=url.rstrip("/"))

    @classmethod
    def launch(
        cls,
        log: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        preset: str | None = "embedded",  # None: what a bare start serves
    ) -> Gateway:
        port = reserved_port()
        listen = ["--host", "127.0.0.1", "--port", str(port)]
        options = [*listen, *(["--preset", preset] if preset else []), *args]
        return cls.start(port, log, options, env or {})

    @classmethod
    def start(
        cls, port: int, log: Path, args: Sequence[str], variables: Mapping[str, str]
    ) -> Gateway:
        """A gateway that listens on `port`, as its arguments or variables say. It ends with this
        process, however that ends."""
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command(), *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(variables),
                # Not a session: an engine that spins in another starves this one's processes for
                # seconds (Linux 6.18, autogroups).
                process_group=0,
                preexec_fn=request_death_signal,
            )
        return cls(f"http://127.0.0.1:{port}", log, process, time.monotonic())

    @property
    def owned(self) -> bool:
        return self.process is not None

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log else ""

    def tail(self, lines: int = 60) -> str:
        return "\n--- end of the gateway's log ---\n" + "\n".join(self.text().splitlines()[-lines:])

    def alive(self) -> bool:
        return self.process is None or self.process.poll() is None

    def _see(
        self, http: httpx.Client, method: str, path: str, body: object = None
    ) -> httpx.Response | None:
        try:
            response = http.request(method, path, json=body)
        except httpx.TransportError:
            return None
        self.while_starting.setdefault(f"{method} {path}", []).append(response)
        return response

    def _wait(
        self, path: str, done: Callable[[httpx.Response], bool], what: str, timeout_s: float
    ) -> httpx.Response:
        """The first answer that is what is waited for."""
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as http:
            while (seen := self._see(http, "GET", path)) is None or not done(seen):
                assert self.alive(), f"the gateway exited before it was {what}{self.tail()}"
                assert time.monotonic() < deadline, f"not {what} after {timeout_s} s{self.tail()}"
                time.sleep(POLL_S)
        return seen

    def wait_bound(self) -> None:
        self._wait("/livez", lambda _: True, "bound to its port", 30.0)
        self.bound_after_s = time.monotonic() - self.started_at

    def wait_ready(self, timeout_s: float = 240.0) -> Gateway:
        self.wait_bound()
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as http:
            for method, path, body in TOO_EARLY:
                self._see(http, method, path, body)
        self._wait("/readyz", lambda seen: seen.status_code == 200, "ready", timeout_s)
        self.ready_after_s = time.monotonic() - self.started_at
        return self

    def engine_core(self) -> psutil.Process | None:
        """The process of the engine core, if it is there."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next((child for child in children if "EngineCore" in child.name()), None)

    def wait_phase(self, phase: str, timeout_s: float = 240.0) -> None:
        """Until /readyz names this phase, which comes before readiness."""
        self.wait_bound()
        seen = self._wait(
            "/readyz",
            lambda seen: seen.status_code != 503 or seen.json()["phase"] == phase,
            phase,
            timeout_s,
        )
        assert seen.status_code == 503, f"ready, and not seen {phase}{self.tail()}"

    def wait_exit(self, timeout_s: float) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s{self.tail()}") from None

    def signal(self, number: int, whole_terminal: bool = False) -> None:
        """SIGTERM goes to the process alone; a terminal sends Ctrl-C to every process in it."""
        assert self.process is not None
        if whole_terminal:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def stop(self, timeout_s: float = STOP_WITHIN_S) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        """Whatever happened, leave nothing of this gateway behind."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def leftovers(self) -> list[str]:
        """Processes of this gateway's group that do not end with it."""
        deadline = time.monotonic() + LEFTOVERS_WITHIN_S
        while (found := self._group()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return found

    @contextlib.contextmanager
    def serving(self, ready_within_s: float = 240.0) -> Iterator[Gateway]:
        """Once it is ready; at the end it is stopped, and leaves nothing behind."""
        try:
            yield self.wait_ready(ready_within_s)
            code = self.stop()
            assert code == 0, f"exit code {code} after SIGTERM{self.tail()}"
            assert self.leftovers() == [], "processes outlived the gateway"
        finally:
            self.kill()

    def _group(self) -> list[str]:
        """Running processes of this gateway's group (Linux; empty elsewhere)."""
        assert self.process is not None
        found: list[str] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                content = stat.read_text()
                match = re.match(r"(\d+) \(.*\) (\S) \d+ (\d+)", content, re.DOTALL)
                if match and int(match[3]) == self.process.pid and match[2] != "Z":
                    line = stat.with_name("cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{match[1]} {line.decode(errors='replace')[:100]}")
            except OSError:
                continue
        return found
