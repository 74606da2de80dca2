from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafters.learning import load_signal
from drafters.learning.load_signal import GatewayLoad, LoadSignal


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
    now = time.monotonic()
    assert GatewayLoad(now, os.getpid(), 0).idle()
    assert not GatewayLoad(now, os.getpid(), 1).idle()
    # It is there, and has not said anything for a while: starved, or it hangs.
    assert not GatewayLoad(now - 10, os.getpid(), 0).idle()
    assert GatewayLoad(now - 10, gone, 5).idle()
    # Another process has its number by now, or the machine was started anew.
    assert GatewayLoad(now - 100, os.getpid(), 5).idle()
    assert GatewayLoad(now + 1e6, os.getpid(), 5).idle()


def test_a_gateway_in_another_container_has_no_process_here(gone: int):
    """The fault: a learner beside it trained under load, since it saw no process."""
    assert not GatewayLoad(time.monotonic() - 1, gone, 1).idle()
    assert GatewayLoad(time.monotonic() - 1, gone, 0).idle()
