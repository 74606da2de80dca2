"""The learner as processes: it yields to load, outlives kills, and leaves nobody behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.cli import main as aerie
from drafters.learning.lineage import Lineage
from drafters.learning.load_signal import STARTING, Activity, LoadSignal
from drafters.model.checkpoint import save_head
from drafters.train.learner import parent as module
from drafters.train.learner.pacing import SETTLED_S, TICK_S, Pacing
from drafters.train.learner.parent import _activity, _pace
from drafters.train.target import FrozenTarget
from tests.drafters.train.conftest import NewHead
from tests.drafters.train.learner.test_round import served, write
from tests.waiting import until

BUSY = "while True: pass"


def state(pid: int) -> str:
    """The letter of a process's state: R, S, T (stopped), Z; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", BUSY])
    yield child
    child.kill()
    child.wait()


def test_a_child_is_stopped_within_a_tenth_of_a_second_of_load(
    tmp_path: Path, busy: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    """At the second look at the latest, however long this machine pauses between them."""
    signal_, looks, signalled = LoadSignal(tmp_path), [0], list[int]()
    send = busy.send_signal

    def pace() -> None:
        _pace(busy, Pacing(), tmp_path, None)

    def sleep(seconds: float) -> None:
        looks[0] += 1
        rest(seconds)

    def noted(number: int) -> None:
        signalled.append(looks[0])
        send(number)

    def becomes(letter: str, requests: int) -> bool:
        """Whether the child has this state; the load is renewed, as a gateway does."""
        signal_.write(requests)
        return state(busy.pid) == letter

    rest = time.sleep
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(busy, "send_signal", noted)
    signal_.write(0)
    pacing = threading.Thread(target=pace)
    pacing.start()
    try:
        assert 2 * TICK_S <= 0.1
        for _ in range(3):
            until(lambda: becomes("R", 0))
            signal_.write(1)
            before = looks[0]
            until(lambda: becomes("T", 1))
            assert signalled[-1] <= before + 1
            until(lambda before=before: looks[0] > before + 3)
            assert state(busy.pid) == "T"
        assert until(lambda: becomes("R", 0)) > SETTLED_S / 2
    finally:
        busy.kill()
        pacing.join()
        signal_.close()


def test_a_gateway_that_could_not_write_yet_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches: a full disk under the file of the load that ends the gateway's start, or lets a
    learner train beside it."""
    assert _activity(tmp_path) is Activity.IDLE

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        signal_ = LoadSignal(tmp_path)
    assert _activity(tmp_path) is Activity.BUSY
    signal_.write(0)
    assert _activity(tmp_path) is Activity.IDLE
    signal_.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of learning without any data, and a head that nobody reads."""
    for name in ("dir", "head"):
        (tmp_path / name).mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    return tmp_path / "dir"


def command(folder: Path, *options: str) -> list[str]:
    head = folder.parent / "head"
    return [sys.executable, "-m", "drafters.train.learner", str(folder), "--head", str(head),
            "--target", "none", *options]  # fmt: skip


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def learner(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A learner whose child waits for data."""
    parent = subprocess.Popen(command(folder), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert b"waiting: 0 of 8000 new tokens" in parent.stdout.readline()
    yield parent
    parent.kill()
    parent.wait()
    parent.stdout.close()


def test_the_child_takes_least_and_ends_with_its_parent(learner: subprocess.Popen[bytes]):
    [child] = children(learner.pid)
    assert os.getpriority(os.PRIO_PROCESS, child) == 19
    assert os.sched_getscheduler(child) == os.SCHED_IDLE
    assert Path(f"/proc/{child}/oom_score_adj").read_text().strip() == "1000"
    assert "libtorch" not in Path(f"/proc/{child}/maps").read_text()
    learner.kill()
    learner.wait()
    until(lambda: state(child) in ("", "Z"))


def test_a_stopped_child_ends_with_its_parent_too(learner: subprocess.Popen[bytes], folder: Path):
    [child] = children(learner.pid)
    signal_ = LoadSignal(folder)
    signal_.write(1)
    until(lambda: state(child) == "T")
    learner.kill()
    learner.wait()
    until(lambda: state(child) in ("", "Z"))
    signal_.close()


def test_no_child_is_there_while_an_engine_starts(learner: subprocess.Popen[bytes], folder: Path):
    """Catches: a child that is only stopped, and keeps memory which the starting engine then takes
    for used, or one that is started meanwhile."""
    [child] = children(learner.pid)
    signal_ = LoadSignal(folder)
    until(lambda: state(child) == "")
    for _ in range(10):
        time.sleep(TICK_S)
        signal_.write(STARTING)
        assert not children(learner.pid)
    signal_.write(0)
    until(lambda: children(learner.pid))
    assert not (folder / "work" / "failures.json").exists()
    signal_.close()


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_log_that_cannot_be_written_ends_no_learner(folder: Path):
    """Catches: a line of the log that raises, since its reader has gone or its disk is full: the
    child's on standard output, the parent's on standard error."""
    with open("/dev/full", "wb") as full:
        run = command(folder, "--minutes", "0.05")
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, timeout=60, check=True)
        assert done.stderr == b""
        parent = subprocess.Popen(command(folder), stdout=full, stderr=full)
        try:
            until(lambda: children(parent.pid))
            [child] = children(parent.pid)
            os.kill(child, signal.SIGKILL)
            until(lambda: children(parent.pid) not in ([], [child]))
        finally:
            parent.kill()
            parent.wait()


@pytest.mark.parametrize("option", ["--forever", "--rounds=1"])
def test_a_learner_that_always_fails_ends_where_it_is_started_again(folder: Path, option: str):
    """Catches: one beside a gateway that fails in every round, and never ends, so that no restart
    of it is counted and no alert fires; or another one that gives up."""
    parent = subprocess.Popen(command(folder, option), stderr=subprocess.PIPE, text=True)
    assert parent.stderr is not None
    killed: list[int] = []
    try:
        for _ in range(3):
            until(lambda: set(children(parent.pid)) - set(killed), what="no child")
            [child] = children(parent.pid)
            os.kill(child, signal.SIGKILL)
            killed.append(child)
            line = parent.stderr.readline()
        if option == "--forever":
            assert parent.wait(60) == 1
            assert line == "learner: ended with -9, 3 times in a row\n"
        else:
            assert "ended with -9, again in 4 s" in line
    finally:
        parent.kill()
        parent.wait()
        parent.stderr.close()


def test_a_child_that_was_killed_is_started_again(learner: subprocess.Popen[bytes]):
    [child] = children(learner.pid)
    os.kill(child, signal.SIGKILL)
    until(lambda: children(learner.pid) not in ([], [child]))


def test_a_crash_is_a_failure_and_a_kill_from_outside_is_none(
    learner: subprocess.Popen[bytes], folder: Path
):
    failures = folder / "work" / "failures.json"
    [killed] = children(learner.pid)
    os.kill(killed, signal.SIGKILL)
    until(lambda: children(learner.pid) not in ([], [killed]))
    assert not failures.exists()
    [crashed] = children(learner.pid)
    os.kill(crashed, signal.SIGABRT)
    until(lambda: failures.exists() and failures.read_text().strip() == "1")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once(learner: subprocess.Popen[bytes], number: signal.Signals):
    [child] = children(learner.pid)
    learner.send_signal(number)
    assert learner.wait(10) == 0
    assert state(child) in ("", "Z")


def test_nohup_is_honoured(folder: Path):
    """The fault: `nohup aerie learn &` ended with the login that had started it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        learner = subprocess.Popen(command(folder))
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        until(lambda: children(learner.pid) != [], what="no child")  # its handlers are in place
        learner.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            learner.wait(0.5)
    finally:
        learner.kill()
        learner.wait()


def test_a_second_learner_keeps_away(learner: subprocess.Popen[bytes], folder: Path):
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "another learner works on" in done.stderr


def test_it_ends_after_its_minutes(folder: Path):
    done = subprocess.run(
        command(folder, "--minutes", "0.02"), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--threads", "4096"], "half of the cores"),
        (["--share", "2"], "--share is a share"),
        (["--mix-share", "1"], "--mix-share"),
        (["--mix", "/nowhere/prompts.jsonl"], "there is no /nowhere/prompts.jsonl"),
        (["--head", "/nowhere"], "no head in /nowhere"),
    ],
    ids=lambda item: item[0] if isinstance(item, list) else "",
)
def test_wrong_options_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
):
    assert aerie(["learn", *command(folder)[3:], *options]) == 2
    assert problem in capsys.readouterr().err


def hurry(pid: int) -> None:
    """Let a child of the lowest priority compete with other tests, where that is allowed."""
    with suppress(OSError):
        if os.sched_getscheduler(pid) == os.SCHED_IDLE:
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, pid, 0)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a child of the lowest priority starves beside other tests
def test_a_round_outlives_kill_9_of_child_and_parent(
    tmp_path: Path, target: FrozenTarget, target_folder: Path, new_head: NewHead
):
    """Each is killed whenever something new has appeared in the folder of the round."""
    save_head(new_head(), tmp_path / "head")
    (tmp_path / "dir").mkdir()
    write(tmp_path / "dir", "a", served(target, "alice", 60, seed=1))
    run = [
        *command(tmp_path / "dir", "--rounds", "1", "--new-tokens", "1000", "--k", "3"),
        "--epochs", "6", "--answer-tokens", "4000", "--device", "cpu",
        "--muon-lr", "0.02", "--adam-lr", "0.01", "--target", str(target_folder),
    ]  # fmt: skip
    work, seen, kills = tmp_path / "dir" / "work" / "round", set[str](), 0
    lineage = Lineage(tmp_path / "dir")
    parent = subprocess.Popen(run)
    try:
        while parent.poll() is None:
            names = {file.name for file in work.glob("*") if not file.name.startswith(".")}
            for child in children(parent.pid):
                hurry(child)
            if names - seen and kills < 4:
                seen |= names
                kills += 1
                if kills % 2:
                    for child in children(parent.pid):
                        os.kill(child, signal.SIGKILL)
                else:
                    parent.kill()
                    parent.wait()
                    parent = subprocess.Popen(run)
            time.sleep(0.005)
    finally:
        parent.kill()
        parent.wait()
    # On a fast machine several things appear at once; both have been killed in any case.
    assert parent.returncode == 0 and kills >= 3
    assert [item.number for item in lineage.generations()] == [1]
    assert not work.exists()
