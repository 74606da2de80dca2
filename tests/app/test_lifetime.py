"""A gateway and its engine end together, in whatever stage and however they are ended, and the next
start finds nothing of them. The engine is a stand-in; tests/e2e/test_lifetime.py has a real one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import psutil
import pytest

from app.server.runtime_directory import PREFIX, remove_leftovers
from tests.app import stand_in_gateway
from tests.ports import reserved_port
from tests.waiting import until

# One process imports the gateway, and forks for each.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([stand_in_gateway.__name__])
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

    def __init__(
        self, temporary: Path, stage: str, drain_s: int = 60, *, hang_ups: bool = True
    ) -> None:
        self.port = reserved_port()
        behaviour = stage if stage in ("start", "calibration") else "serving"
        self.temporary = temporary
        self.client: socket.socket | None = None
        self.said, end = FORKED.Pipe(duplex=False)
        self.process = FORKED.Process(
            target=stand_in_gateway.serve,
            args=(end, str(temporary), behaviour, self.port, drain_s, hang_ups),
        )
        self.process.start()
        end.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        engine = self.said.recv()
        self.core, self.worker = engine["core"], engine["worker"]
        self.segment = Path("/dev/shm") / engine["segment"]
        until(self.noted, TIMEOUT_S, "the segment is on the list")
        if behaviour == "serving":
            self.ask("prefill" if stage == "prefill" else "decode")
        if stage == "drain":
            os.kill(self.pid, signal.SIGTERM)
            until(lambda: not self.listens(), TIMEOUT_S, "the gateway drains")

    def wait(self) -> int | None:
        """The exit code, None if it does not end."""
        self.process.join(GONE_WITHIN_S)
        return self.process.exitcode

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
        assert self.said.recv() == "asked"
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
        self.process.kill()
        for pid in (self.core, self.worker):
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.join()
        self.said.close()


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
    os.killpg(gateway.pid, signal.SIGKILL)


def hang_up(gateway: Gateway) -> None:
    """As a terminal does when it goes: to the whole group."""
    os.killpg(gateway.pid, signal.SIGHUP)


def terminate_often(gateway: Gateway) -> None:
    """Until it has ended: while it drains, while it clears away, as it ends."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while gateway.process.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(gateway.pid, signal.SIGTERM)
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
        code = gateway.wait()
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
        dead.wait()
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
    gateway = Gateway(temporary, "decode", hang_ups=False)
    try:
        os.kill(gateway.pid, signal.SIGHUP)
        time.sleep(0.5)
        assert gateway.ready()
    finally:
        gateway.close()
        gateway.segment.unlink(missing_ok=True)
