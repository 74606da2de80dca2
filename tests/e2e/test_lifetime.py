"""A gateway with a real engine is killed, or its terminal ends: nothing of it outlives it.

tests/app/test_lifetime.py tries every stage and signal with a stand-in for the engine.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.server.runtime_directory import PREFIX
from tests.waiting import until

from .draining import BODY, assert_it_drains
from .gateway import POLL_S, STOP_WITHIN_S, Gateway
from .wire import GENERATED, metric

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STAGE_WITHIN_S = 120.0
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short name: sockets lie in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def launched(temporary: Path, log: Path, *arguments: str) -> Iterator[Gateway]:
    gateway = Gateway.launch(log, ["--enforce-eager", *arguments], {"TMPDIR": str(temporary)})
    try:
        yield gateway
    finally:
        gateway.kill()


def folders(temporary: Path) -> list[Path]:
    return list(temporary.glob(f"{PREFIX}*"))


def assert_nothing_is_drafted(gateway: Gateway) -> None:
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http:
        http.post("/v1/completions", json={**BODY, "stream": False}).raise_for_status()
        if DRAFTED in http.get("/metrics").text:
            assert metric(http, DRAFTED) == 0
        assert metric(http, GENERATED) > 0


def test_killed_and_hung_up(temporary: Path, tmp_path: Path) -> None:
    with launched(temporary, tmp_path / "1.log") as gateway:
        gateway.wait_bound()
        until(gateway.engine_core, STAGE_WITHIN_S, gateway.tail, POLL_S)
        gateway.signal(signal.SIGKILL)
        gateway.wait_exit(STOP_WITHIN_S)
        assert gateway.leftovers() == [], "an engine that loads outlived the gateway"
        left = folders(temporary)
        assert left, "nothing to remove: nothing is tested"

    with launched(temporary, tmp_path / "2.log", "--k", "0") as gateway:
        gateway.wait_ready()
        assert_nothing_is_drafted(gateway)
        (own,) = folders(temporary)
        assert own not in left
        assert_it_drains(gateway, signal.SIGHUP, whole_terminal=True)
        assert folders(temporary) == []
        assert [path.name for path in temporary.iterdir() if path.is_socket()] == []
