"""A gateway and its engine end together, in whatever stage and however they are ended, and the next
start finds nothing of them. The engine is a stand-in; tests/e2e/test_lifetime.py has a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.server.runtime_directory import PREFIX, remove_leftovers
from tests.ports import reserved_port
from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("stand_in_gateway.py")
GONE_WITHIN_S = 30.0  # half of the drain that an end may not wait for
TIMEOUT_S = 30.0
STAGES = ("start", "calibration", "prefill", "decode", "drain")
FAILED, LOST = 1, 3


def running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Gateway:
    """A stand-in gateway that has come to a stage."""

    def __init__(self, temporary: Path, stage: str, drain_s: int = 60) -> None:
        self.port = reserved_port()
        behaviour = stage if stage in ("start", "calibration") else "serving"
        self.temporary = temporary
        self.client: socket.socket | None = None
        self.process = subprocess.Popen(
            [sys.executable, str(STAND_IN), str(self.port), behaviour, str(drain_s)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)},
            process_group=0,
        )
        engine = self.line()
        self.core, self.worker = int(engine["core"]), int(engine["worker"])
        self.segment = Path("/dev/shm") / engine["segment"]
        until(self.noted, TIMEOUT_S, "the segment is on the list")
        if behaviour == "serving":
            self.ask("prefill" if stage == "prefill" else "decode")
        if stage == "drain":
            self.process.send_signal(signal.SIGTERM)
            until(lambda: not self.listens(), TIMEOUT_S, "the gateway drains")

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def noted(self) -> bool:
        lists = self.temporary.glob(f"{PREFIX}*/files.json")
        return any(str(self.segment) in file.read_text() for file in lists)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def ask(self, prompt: str) -> None:
        """Begin a stream; read as far as it gets."""
        until(lambda: self.ready(), TIMEOUT_S, "the gateway is ready")
        body = json.dumps({"prompt": prompt, "stream": True})
        self.client = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        self.client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert self.line() == "asked"
        if prompt == "decode":
            seen = b""
            while b"data:" not in seen:
                seen += self.client.recv(65536)

    def ready(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S) as client:
            client.sendall(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return client.recv(65536).split()[1] == b"200"

    def engine_runs(self) -> bool:
        return running(self.core) or running(self.worker)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        for pid in (self.process.pid, getattr(self, "core", 0), getattr(self, "worker", 0)):
            if pid and running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short name: sockets lie in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def kill_the_gateway(gateway: Gateway) -> None:
    gateway.process.kill()


def kill_the_engine(gateway: Gateway) -> None:
    os.kill(gateway.core, signal.SIGKILL)


def kill_everything(gateway: Gateway) -> None:
    """As a container ends for want of memory."""
    os.killpg(gateway.process.pid, signal.SIGKILL)


def hang_up(gateway: Gateway) -> None:
    """As a terminal does when it goes: to the whole group."""
    os.killpg(gateway.process.pid, signal.SIGHUP)


def terminate_often(gateway: Gateway) -> None:
    """Until it has ended: while it drains, while it clears away, as it ends."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while gateway.process.poll() is None and time.monotonic() < deadline:
        gateway.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)


ENDS = (kill_the_gateway, kill_the_engine, hang_up, terminate_often)


@pytest.mark.parametrize(
    ("end", "stage"),
    [*product(ENDS, STAGES), (kill_everything, "decode")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_nothing_is_left(temporary: Path, stage: str, end: Callable[[Gateway], None]) -> None:
    drains = end in (hang_up, terminate_often)  # for as long as it may: the client reads no more
    gateway = Gateway(temporary, stage, drain_s=1 if drains else 60)
    try:
        end(gateway)
        code = gateway.process.wait(GONE_WITHIN_S)
        until(lambda: not gateway.engine_runs(), GONE_WITHIN_S, "the engine's processes end")
        killed = end in (kill_the_gateway, kill_everything)
        if killed:
            assert code == -signal.SIGKILL
            assert gateway.segment.exists(), "somebody else removed it: nothing is tested"
            assert list(temporary.iterdir()) != []
            remove_leftovers(temporary)  # what every start does first
        elif end is kill_the_engine:
            early = stage in ("start", "calibration")
            assert code == (FAILED if early else LOST)
        else:
            assert code == 0
        assert not gateway.segment.exists()
        assert list(temporary.iterdir()) == []
    finally:
        gateway.close()
        gateway.segment.unlink(missing_ok=True)


def test_a_start_leaves_the_files_of_a_running_gateway_alone(temporary: Path) -> None:
    dead, alive = Gateway(temporary, "decode"), Gateway(temporary, "decode")
    try:
        dead.process.kill()
        dead.process.wait(GONE_WITHIN_S)
        until(lambda: not dead.engine_runs(), GONE_WITHIN_S, "the engine's processes end")
        (folder,) = (path.parent for path in temporary.glob("*/files.json") if owns(path, alive))
        before = sorted(folder.iterdir())
        remove_leftovers(temporary)
        assert list(temporary.iterdir()) == [folder]
        assert sorted(folder.iterdir()) == before
        assert alive.segment.exists()
        assert not dead.segment.exists()
        assert alive.ready()
    finally:
        for gateway in (dead, alive):
            gateway.close()
            gateway.segment.unlink(missing_ok=True)


def owns(listing: Path, gateway: Gateway) -> bool:
    return str(gateway.segment) in listing.read_text()


def test_nohup_is_honoured(temporary: Path) -> None:
    """Who starts a gateway to ignore the end of its terminal does not want a drain either."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        gateway = Gateway(temporary, "decode")
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        gateway.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert gateway.ready()
    finally:
        gateway.close()
        gateway.segment.unlink(missing_ok=True)
