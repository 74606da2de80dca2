"""The way of a sequence from the event loop to its file: bounded, counted, never waited for."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.learning import capture as module
from app.learning.capture import QUEUED_TOKENS, RETRY_S, TENANT_TOKENS, Capture
from app.learning.captured_files import CapturedFiles
from app.observability import metrics
from drafters.learning.captured import Captured, read
from tests.clock import Clock
from tests.waiting import until


def sequence(number: int = 0, tenant: str = "", tokens: int = 20) -> Captured:
    return Captured(float(number), tenant, 0, list(range(tokens - 4)), [7] * 4, [(5, 2)])


def value(metric: object) -> float:
    (sample, *_) = metric.collect()[0].samples  # type: ignore[attr-defined]
    return float(sample.value)


class Disk(CapturedFiles):
    """Files whose disk can be full, or not answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 2**20, 1e9)
        self.full = False
        self.broken = False
        self.answers = threading.Event()
        self.answers.set()
        self.tries = 0

    def append(self, tenant: str, lines: bytes) -> None:
        self.tries += 1
        assert self.answers.wait(30)
        if self.broken:
            raise ZeroDivisionError
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(tenant, lines)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def watch() -> Clock:
    return Clock()


@pytest.fixture
def capture(disk: Disk, watch: Clock) -> Iterator[Capture]:
    made = Capture(disk, watch)
    made.start()
    yield made
    disk.answers.set()
    made.close()
    metrics.LEARNING_STOPPED.set(0)


@pytest.fixture
def dropped() -> Callable[[str], float]:
    def count(reason: str) -> float:
        return value(metrics.LEARNING_DROPPED.labels(reason))

    before = {reason: count(reason) for reason in ("queue", "stopped")}
    return lambda reason: count(reason) - before[reason]


def test_what_is_offered_is_written_and_counted(capture: Capture, tmp_path: Path) -> None:
    before = value(metrics.LEARNING_SEQUENCES), value(metrics.LEARNING_TOKENS)
    for number in range(30):
        capture.offer(sequence(number, tenant="ab"[number % 2]))
    until(lambda: value(metrics.LEARNING_SEQUENCES) == before[0] + 30)
    assert value(metrics.LEARNING_TOKENS) == before[1] + 120
    found = list(read(tmp_path))
    assert sorted(each.at for each in found) == list(map(float, range(30)))
    assert Counter(each.tenant for each in found) == {"a": 15, "b": 15}
    assert list(found[0].steps) == [(5, 2)]
    until(
        lambda: value(metrics.LEARNING_BYTES) == sum(f.stat().st_size for f in tmp_path.iterdir())
    )


def test_a_disk_that_does_not_answer_costs_sequences_and_no_time(
    capture: Capture, disk: Disk, dropped: Callable[[str], float]
) -> None:
    disk.answers.clear()
    capture.offer(sequence())
    until(lambda: disk.tries == 1)
    sequences = [sequence(number, tokens=1000) for number in range(2000)]
    spent = time.thread_time()
    for each in sequences:
        capture.offer(each)
    assert time.thread_time() - spent < 0.2
    assert disk.tries == 1, "the disk has not answered yet: nothing has waited for it"
    assert dropped("queue") == 2000 - TENANT_TOKENS // 1000
    assert len(capture._queue) == TENANT_TOKENS // 1000
    capture.offer(sequence(tenant="other", tokens=1000))  # has room beside the flood
    capture.offer(sequence(tenant="huge", tokens=QUEUED_TOKENS))
    assert dropped("queue") == 2001 - TENANT_TOKENS // 1000
    capture._closing.set()
    disk.answers.set()
    until(lambda: not capture._queue)


def test_a_prompt_longer_than_the_queue_is_taken_where_nothing_waits(
    capture: Capture, dropped: Callable[[str], float], tmp_path: Path
) -> None:
    capture._closing.set()
    capture._thread.join()
    capture.offer(sequence(tokens=QUEUED_TOKENS + 1))
    assert dropped("queue") == 0
    capture._work()
    (found,) = read(tmp_path)
    assert len(found.prompt) + len(found.answer) == QUEUED_TOKENS + 1


def test_a_full_disk_stops_capture_for_a_minute(
    capture: Capture,
    disk: Disk,
    watch: Clock,
    dropped: Callable[[str], float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    disk.full = True
    capture.offer(sequence())
    capture.offer(sequence(tenant="b"))
    until(lambda: value(metrics.LEARNING_STOPPED) == 1)
    until(lambda: dropped("stopped") == 2)
    for _ in range(5):
        capture.offer(sequence())
    assert dropped("stopped") == 7
    assert disk.tries == 1
    watch.now += RETRY_S  # still full
    until(lambda: not capture._refusing)
    capture.offer(sequence())
    until(lambda: dropped("stopped") == 8)
    assert value(metrics.LEARNING_STOPPED) == 1
    disk.full = False
    watch.now += RETRY_S
    until(lambda: not capture._refusing)
    capture.offer(sequence())
    until(lambda: value(metrics.LEARNING_STOPPED) == 0)
    assert [record.message for record in caplog.records] == [
        "nothing is captured for 60 s, and then it is tried again: "
        "[Errno 28] No space left on device",
        "sequences are captured again",
    ]


def test_a_defect_stops_capture_and_not_its_thread(
    capture: Capture, disk: Disk, watch: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    disk.broken = True
    capture.offer(sequence())
    until(lambda: capture._refusing)
    assert "ZeroDivisionError" in caplog.text
    disk.broken = False
    watch.now += RETRY_S
    until(lambda: not capture._refusing)
    capture.offer(sequence())
    until(lambda: value(metrics.LEARNING_STOPPED) == 0)


def test_the_thread_computes_for_its_share_of_the_time(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that come faster than it may write them wait, and then are dropped."""
    waits: list[float] = []
    used = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: used[0])
    capture = Capture(disk)
    monkeypatch.setattr(capture._closing, "wait", lambda s: waits.append(s) or False)
    line = Captured.line

    def costly(self: Captured) -> bytes:
        used[0] += 0.001
        return line(self)

    monkeypatch.setattr(Captured, "line", costly)
    for number in range(50):
        capture.offer(sequence(number))
    capture._work()
    assert used[0] == pytest.approx(0.05)
    assert used[0] / (used[0] + sum(waits)) <= module.SHARE * 1.001


def test_idle_time_is_no_debt(
    disk: Disk, watch: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a quiet hour the first sequence is written at once."""
    waits: list[float] = []
    used = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: used[0])
    capture = Capture(disk, watch)
    monkeypatch.setattr(capture._closing, "wait", lambda s: waits.append(s) or False)
    for _ in range(18_000):
        watch.now += module.TICK_S
        used[0] += 0.00015
        capture._work()
    capture.offer(sequence())
    line = Captured.line

    def costly(self: Captured) -> bytes:
        used[0] += 0.001
        return line(self)

    monkeypatch.setattr(Captured, "line", costly)
    capture._work()
    assert 0 < waits[0] < 1.0
    assert len(list(read(tmp_path))) == 1


def test_files_are_looked_at_while_sequences_never_cease(
    disk: Disk, watch: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Capture(disk, watch)
    used = [0.0]
    looks: list[float] = []
    tidy, line = disk.tidy, Captured.line

    def costly(self: Captured) -> bytes:
        used[0] += 0.01
        return line(self)

    def wait(seconds: float) -> bool:
        watch.now += seconds
        if watch.now < 300:
            capture.offer(sequence())
        return False

    monkeypatch.setattr(Captured, "line", costly)
    monkeypatch.setattr(time, "thread_time", lambda: used[0])
    monkeypatch.setattr(capture._closing, "wait", wait)
    monkeypatch.setattr(disk, "tidy", lambda: (looks.append(watch.now), tidy()))
    watch.now = 0.0
    capture.offer(sequence())
    while watch.now < 300:
        capture._work()
        watch.now += module.TICK_S
    assert len(looks) >= 4


def test_the_end_writes_what_waits_and_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 60.0)
    capture = Capture(Disk(tmp_path))
    capture.start()
    for number in range(400):
        capture.offer(sequence(number, tokens=200))
    capture.close()
    assert len(list(read(tmp_path))) == 400
    assert not capture._thread.is_alive(), "that is what was waited for, and no time"
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    stuck = Disk(tmp_path)
    stuck.answers.clear()
    capture = Capture(stuck)
    capture.start()
    capture.offer(sequence())
    capture.close()
    assert capture._thread.is_alive()
    stuck.answers.set()


def test_the_event_loop_goes_on_while_long_prompts_are_written(tmp_path: Path) -> None:
    """Python runs one thread at a time: what the writer computes in one go, the loop waits for."""
    capture = Capture(CapturedFiles(tmp_path, 2**28, 1e9))
    long = sequence(tokens=130_000)

    async def gaps() -> list[float]:
        capture.start()
        found = []
        for _ in range(40):
            capture.offer(long)
            before, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.02)
            # Another process may have the core; this one's other thread is what it may wait for.
            found.append(min(time.perf_counter() - before - 0.02, time.process_time() - cpu))
        await asyncio.to_thread(capture.close)
        return sorted(found)

    assert asyncio.run(gaps())[-2] < 0.02
    assert len(list(read(tmp_path))) >= 2


WRITE = """
import sys
from pathlib import Path
from app.learning.capture import Capture
from app.learning.captured_files import CapturedFiles
from drafters.learning.captured import Captured
import app.learning.capture as module
module.TICK_S, module.SHARE = 0.0, 1.0
capture = Capture(CapturedFiles(Path(sys.argv[1]), 2**26, 1e9))
capture.start()
print("begun", flush=True)
number = 0
while True:
    capture.offer(Captured(float(number), "", 0, [number] * 3000, [1] * 500, []))
    number += 1
"""


def test_a_kill_cuts_off_no_more_than_the_last_line(tmp_path: Path) -> None:
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: sum(file.stat().st_size for file in tmp_path.iterdir()) > 2**20)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        lines = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        cut_off = sum(not file.read_bytes().endswith(b"\n") for file in tmp_path.iterdir())
        found = list(read(tmp_path))
        assert len(found) == lines.count(b"\n")
        assert cut_off <= 1
        assert all(list(each.prompt) == [int(each.at)] * 3000 for each in found)
        for file in tmp_path.iterdir():
            file.unlink()
