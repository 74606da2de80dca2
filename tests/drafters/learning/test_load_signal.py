from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafters.learning import load_signal
from drafters.learning.load_signal import STARTING, Activity, GatewayLoad, LoadSignal, start_of
from tests.waiting import until

NOW = 5000.0


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch):
    """The reader's clock: no time passes between a figure and what is made of it."""
    monkeypatch.setattr(load_signal, "time", SimpleNamespace(monotonic=lambda: NOW))


def test_the_learner_reads_what_the_gateway_wrote(tmp_path: Path):
    assert load_signal.read(tmp_path) is None
    signal = LoadSignal(tmp_path, clock=lambda: 7.0)
    signal.write(3)
    assert load_signal.read(tmp_path) == GatewayLoad(
        7.0, os.getpid(), 3, start_of(os.getpid()) or 0
    )
    assert (tmp_path / load_signal.NAME).stat().st_mode & 0o777 == 0o600
    signal.close()


def test_a_gateway_that_ended_before_its_first_write_is_gone(tmp_path: Path):
    """Catches: a start that fails, because its port is taken, and leaves an empty file: a learner
    of its own took the gateway for a busy one, and waited for ever."""
    program = (
        "import pathlib, sys; from drafters.learning.load_signal import LoadSignal;"
        f"LoadSignal(pathlib.Path(sys.argv[1]), clock=lambda: {NOW - 10})"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    load = load_signal.read(tmp_path)
    assert load is not None and load.requests == STARTING
    assert load.activity is Activity.IDLE


@pytest.fixture
def gone() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_idle_is_a_gateway_without_requests_or_none(gone: int):
    now, here = NOW, os.getpid()
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
    now = NOW
    assert GatewayLoad(now - 1, gone, 1).activity is Activity.BUSY
    assert GatewayLoad(now - 1, gone, 0).activity is Activity.IDLE


def test_an_engine_starts_until_its_gateway_says_otherwise_or_is_gone(gone: int):
    now = NOW
    assert GatewayLoad(now - 1, gone, STARTING).activity is Activity.STARTING
    assert GatewayLoad(now - 10, os.getpid(), STARTING).activity is Activity.STARTING
    assert GatewayLoad(now - 10, gone, STARTING).activity is Activity.IDLE


def test_a_gateway_that_lives_is_not_idle_however_long_it_is_silent(tmp_path: Path):
    """The fault: on a full disk it was gone after a minute, and a learner trained under load."""
    signal = LoadSignal(tmp_path, clock=lambda: NOW - 1000.0)
    for requests, activity in (
        (0, Activity.BUSY),
        (2, Activity.BUSY),
        (STARTING, Activity.STARTING),
    ):
        signal.write(requests)
        load = load_signal.read(tmp_path)
        assert load is not None and load.activity is activity
    signal.close()


def test_another_process_with_the_id_of_a_gateway_is_not_the_gateway():
    now, here = NOW, os.getpid()
    another = (start_of(here) or 0) + 1
    assert GatewayLoad(now - 10, here, 5, another).activity is Activity.BUSY
    assert GatewayLoad(now - 100, here, 5, another).activity is Activity.IDLE


def test_a_gateway_that_has_ended_is_gone_though_its_parent_has_not_noticed():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_of(process.pid)
    assert started is not None and started > 0
    process.kill()
    until(lambda: start_of(process.pid) is None)
    now = NOW
    assert GatewayLoad(now - 10, process.pid, 5, started).activity is Activity.IDLE
    process.communicate()


def test_a_gateway_that_could_not_write_yet_has_said_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches: a full disk that ends the gateway's start, or leaves what the one before said."""
    before = LoadSignal(tmp_path)
    before.write(0)
    before.close()

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        LoadSignal(tmp_path).close()
    with pytest.raises(ValueError, match="load has 0 bytes"):
        load_signal.read(tmp_path)


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path):
    (tmp_path / load_signal.NAME).write_bytes(struct.pack("<dqq", 7.0, 12, 3))
    assert load_signal.read(tmp_path) == GatewayLoad(7.0, 12, 3)
