"""How the learner gets to know whether anything is being answered."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.learning import load_report as module
from app.learning.load_report import LoadReport
from drafters.learning import load_signal
from drafters.learning.load_signal import Activity, LoadSignal
from tests.waiting import until


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadReport]:
    """It renews nothing: what is written was told."""
    monkeypatch.setattr(module, "RENEWED_S", 3600.0)
    made = LoadReport(LoadSignal(tmp_path))
    made.start()
    yield made
    made.close()


def requests(folder: Path) -> int | None:
    """What was written last; None before the first time."""
    if not (folder / load_signal.NAME).stat().st_size:
        return None
    load = load_signal.read(folder)
    assert load is not None
    return load.requests


def test_an_engine_that_starts_is_load(report: LoadReport, tmp_path: Path) -> None:
    """Otherwise the learner would slow down what start-up measures."""
    until(lambda: requests(tmp_path) == load_signal.STARTING)
    report.serve(True)
    until(lambda: requests(tmp_path) == 0)
    report.count(3)
    report.serve(False)  # the engine died: none of its requests comes back
    until(lambda: requests(tmp_path) == load_signal.STARTING)
    report.serve(True)
    until(lambda: requests(tmp_path) == 0)


def test_the_first_request_and_the_last_are_told_at_once(
    report: LoadReport, tmp_path: Path
) -> None:
    """Not with the next renewal, which does not come here."""
    report.serve(True)
    until(lambda: requests(tmp_path) == 0)
    for sequences, busy in ((1, True), (0, False)) * 5:
        report.count(sequences)
        until(lambda busy=busy: bool(requests(tmp_path)) == busy)  # type: ignore[misc]


def test_the_first_request_is_there_when_the_thread_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a thread that looked at once saw no request, and looked again a second later."""
    report, seen = LoadReport(LoadSignal(tmp_path)), list[int]()
    report.serve(True)
    monkeypatch.setattr(report._changed, "set", lambda: seen.append(report.requests))
    report.count(1)
    report.count(0)
    assert seen == [1, 0]


def test_the_load_is_renewed_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, waits = LoadReport(LoadSignal(tmp_path)), list[float]()
    wait = report._changed.wait

    def soon(seconds: float) -> bool:
        waits.append(seconds)
        return wait(0.01)

    monkeypatch.setattr(report._changed, "wait", soon)
    report.serve(True)
    report.start()
    until(lambda: waits)
    first = load_signal.read(tmp_path)
    assert first is not None
    until(lambda: load_signal.read(tmp_path) != first)
    until(lambda: load_signal.read(tmp_path).activity is Activity.IDLE)  # type: ignore[union-attr]
    report.close()
    assert set(waits) == {load_signal.RENEWED_S}


class Stuck(LoadSignal):
    def __init__(self, folder: Path) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.full = False
        self.tries = 0
        super().__init__(folder)  # which writes for the first time
        self.answers.clear()

    def write(self, requests: int) -> None:
        assert self.answers.wait(30)
        self.tries += 1
        if self.full:
            raise OSError(errno.EIO, "Input/output error")
        super().write(requests)


def test_a_disk_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signal = Stuck(tmp_path)
    report = LoadReport(signal)
    report.start()
    began = time.thread_time()
    for number in range(10_000):
        report.count(number % 2)
    assert time.thread_time() - began < 0.5
    signal.full = True
    signal.answers.set()
    for number in range(10):
        before = signal.tries
        report.count(number % 2)
        report.count(1 - number % 2)
        until(lambda before=before: signal.tries > before)  # type: ignore[misc]
    assert caplog.text.count("is not told to the learner") == 1
    signal.full = False
    report.serve(True)
    until(lambda: requests(tmp_path) is not None)
    report.close()
