"""A gateway with a real engine is killed, or its terminal ends: nothing of it outlives it.

tests/app/test_lifetime.py tries every stage and signal with a stand-in for the engine.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.server.runtime_directory import PREFIX

from .gateway import MODEL, POLL_S, STOP_WITHIN_S, Gateway
from .wire import chunks, read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STAGE_WITHIN_S = 120.0
BODY = {
    "model": MODEL,
    "prompt": "def f(",
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 200,
    "stream": True,
}


@pytest.fixture(autouse=True)
def unharmed() -> None:
    """In place of the check of the shared gateway, which these tests do not use."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short name: sockets lie in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def launched(temporary: Path, log: Path) -> Iterator[Gateway]:
    gateway = Gateway.launch(log, ["--enforce-eager"], {"TMPDIR": str(temporary)})
    try:
        yield gateway
    finally:
        gateway.kill()


def engine_runs(gateway: Gateway) -> bool:
    assert gateway.process is not None
    children = psutil.Process(gateway.process.pid).children(recursive=True)
    return any("EngineCore" in child.name() for child in children)


def folders(temporary: Path) -> list[Path]:
    return list(temporary.glob(f"{PREFIX}*"))


@contextmanager
def streaming(gateway: Gateway) -> Iterator[tuple[Iterator[Any], Any]]:
    """A stream after its first event."""
    with (
        httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http,
        http.stream("POST", "/v1/completions", json=BODY) as response,
    ):
        events = read_events(response.iter_lines())
        yield events, next(events)


def test_killed_and_hung_up(temporary: Path, tmp_path: Path) -> None:
    with launched(temporary, tmp_path / "1.log") as gateway:
        gateway.wait_bound()
        deadline = time.monotonic() + STAGE_WITHIN_S
        while not engine_runs(gateway):
            assert time.monotonic() < deadline, f"no engine core{gateway.tail()}"
            time.sleep(POLL_S)
        gateway.signal(signal.SIGKILL)
        gateway.wait_exit(1)
        assert gateway.leftovers() == [], "an engine that loads outlived the gateway"
        left = folders(temporary)
        assert left, "nothing to remove: nothing is tested"

    with launched(temporary, tmp_path / "2.log") as gateway:
        gateway.wait_ready()
        (own,) = folders(temporary)
        assert own not in left
        with streaming(gateway) as (events, first):
            gateway.signal(signal.SIGHUP, whole_terminal=True)
            seen = [first, *events]
        ends = [c["finish_reason"] for p in chunks(seen) for c in p["choices"]]
        assert ends[-1] == "length", f"the stream was cut{gateway.tail()}"
        assert gateway.wait_exit(STOP_WITHIN_S) == 0
        assert gateway.leftovers() == []
        assert folders(temporary) == []
        assert [path.name for path in temporary.iterdir() if path.is_socket()] == []
