"""Servers as child processes: waited for, ended, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.served import ceiling
from bench.systems.server import Server, ServerError
from tests.ports import reserved_port
from tests.waiting import until

NULL = [sys.executable, "-m", "bench.load.null_server"]
ROOT = Path(__file__).resolve().parents[3]


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_server_is_awaited_and_ended(here: None, tmp_path: Path) -> None:
    port = reserved_port()
    server = Server([*NULL, str(port), "4", "0"], os.environ, port, tmp_path / "a.log")
    assert server.wait("/health", 30) is server
    server.check()
    assert listens(port)
    server.stop()
    assert not listens(port)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    line = [sys.executable, "-c", "raise SystemExit('no such head')"]
    server = Server(line, os.environ, reserved_port(), tmp_path / "a.log")
    with pytest.raises(ServerError, match="no such head"):
        server.wait("/health", 30)
    server.stop()


def test_a_server_ends_with_a_bench_that_was_killed(tmp_path: Path) -> None:
    """SIGKILL leaves no time to tidy up: the kernel does it."""
    port = reserved_port()
    program = (
        "import os, sys, time; from pathlib import Path; from bench.systems.server import Server; "
        f"Server([sys.executable, '-m', 'bench.load.null_server', '{port}', '4', '0'], os.environ, "
        f"{port}, Path({str(tmp_path)!r}) / 'a.log').wait('/health', 30); "
        "print('up', flush=True); time.sleep(60)"
    )
    bench = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert bench.stdout is not None
    assert bench.stdout.readline() == b"up\n"
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    bench.stdout.close()
    until(lambda: not listens(port), 20, "the server outlived its bench", 0.1)


def test_the_clients_ceiling_is_measured(
    here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ceiling, "LOG", tmp_path / "ceiling.log")
    assert ceiling.main(["--concurrency", "2", "--gaps-ms", "1"]) == 0
    assert '"client_us_per_chunk"' in capsys.readouterr().out
