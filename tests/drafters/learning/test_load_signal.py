from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafters.learning import load_signal
from drafters.learning.load_signal import STARTING, Activity, GatewayLoad, LoadSignal


def test_the_learner_reads_what_the_gateway_wrote(tmp_path: Path):
    assert load_signal.read(tmp_path) is None
    signal = LoadSignal(tmp_path, clock=lambda: 7.0)
    signal.write(3)
    assert load_signal.read(tmp_path) == GatewayLoad(7.0, os.getpid(), 3)
    assert (tmp_path / load_signal.NAME).stat().st_mode & 0o777 == 0o600
    signal.close()


@pytest.fixture
def gone() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_idle_is_a_gateway_without_requests_or_none(gone: int):
    now, here = time.monotonic(), os.getpid()
    assert GatewayLoad(now, here, 0).activity is Activity.IDLE
    assert GatewayLoad(now, here, 1).activity is Activity.BUSY
    # It is there, and has not said anything for a while: starved, or it hangs.
    assert GatewayLoad(now - 10, here, 0).activity is Activity.BUSY
    assert GatewayLoad(now - 10, gone, 5).activity is Activity.IDLE
    # Another process has its number by now, or the machine was started anew.
    assert GatewayLoad(now - 100, here, 5).activity is Activity.IDLE
    assert GatewayLoad(now + 1e6, here, 5).activity is Activity.IDLE


def test_a_gateway_in_another_container_has_no_process_here(gone: int):
    """The fault: a learner beside it trained under load, since it saw no process."""
    now = time.monotonic()
    assert GatewayLoad(now - 1, gone, 1).activity is Activity.BUSY
    assert GatewayLoad(now - 1, gone, 0).activity is Activity.IDLE


def test_an_engine_starts_until_its_gateway_says_otherwise_or_is_gone(gone: int):
    now = time.monotonic()
    assert GatewayLoad(now - 1, gone, STARTING).activity is Activity.STARTING
    assert GatewayLoad(now - 10, os.getpid(), STARTING).activity is Activity.STARTING
    assert GatewayLoad(now - 10, gone, STARTING).activity is Activity.IDLE
