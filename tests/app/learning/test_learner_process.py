"""The learner beside the gateway: started when it is ready, again when it dies, ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from app.learning import learner_process as module
from app.learning.learner_process import LearnerProcess, learner_command
from tests.waiting import soon, until

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
# It trains, and holds out against SIGTERM.
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("there", flush=True)
time.sleep(60)
"""


async def test_it_starts_when_told_and_ends_with_the_gateway() -> None:
    async with LearnerProcess(lambda: SLEEPS) as learner:
        await asyncio.sleep(0.2)
        assert learner.pid is None
        learner.start()
        learner.start()
        await soon(lambda: learner.pid is not None)
        pid = learner.pid
        assert pid is not None
        assert os.getpgid(pid) == pid  # Ctrl-C in a terminal drains first
    assert not psutil.pid_exists(pid)


async def test_one_that_is_never_started_ends_too() -> None:
    async with asyncio.timeout(10), LearnerProcess(lambda: SLEEPS):
        pass


async def test_one_that_dies_is_started_again_with_growing_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    async with LearnerProcess(lambda: [sys.executable, "-c", "raise SystemExit(3)"]) as learner:
        learner.start()
        await soon(lambda: len(caplog.records) >= 4)
        assert learner.background.failures >= 4
    assert "learner ended unexpectedly (LearnerEndedError('ended with code 3'))" in caplog.text
    assert [record.args[2] for record in caplog.records[:4]] == [0.01, 0.02, 0.04, 0.08]  # type: ignore[index]


async def test_one_that_is_killed_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    async with LearnerProcess(lambda: SLEEPS) as learner:
        learner.start()
        await soon(lambda: learner.pid is not None)
        first = learner.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await soon(lambda: learner.pid not in (None, first))


async def test_one_that_cannot_be_started_breaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LearnerProcess(lambda: ["/no/such/program"]) as learner:
        learner.start()
        await soon(lambda: "cannot be started" in caplog.text)


async def test_a_file_system_that_does_not_answer_keeps_no_gateway_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.05)
    monkeypatch.setattr(module, "HUNG_S", 0.05)
    asked, answers = threading.Event(), threading.Event()

    def hang() -> list[str]:
        asked.set()
        answers.wait()
        return SLEEPS

    try:
        async with asyncio.timeout(10), LearnerProcess(hang) as learner:
            learner.start()
            await soon(asked.is_set)
    finally:
        answers.set()


async def test_one_that_is_stopped_or_does_not_listen_is_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.3)
    async with LearnerProcess(lambda: [sys.executable, "-c", STUBBORN]) as learner:
        learner.start()
        output = ""
        while "there" not in output:
            output += capfd.readouterr().err
            await asyncio.sleep(0.01)
        pid = learner.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)


def test_models_of_the_hub_are_the_folders_that_the_engine_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def of_cache(name: str, *, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        return f"/cache/{name}/{revision}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", of_cache)
    command = learner_command(tmp_path, "org/target", "v2", "org/head", 5, 0.0, 99, "cpu")
    assert command[command.index("--target") + 1] == "/cache/org/target/v2"
    assert command[command.index("--head") + 1] == "/cache/org/head/None"
    command = learner_command(
        tmp_path, "packaged:smollm2-135m", None, str(tmp_path), 5, 0.0, 99, "cpu"
    )
    assert command[command.index("--target") + 1] == "packaged:smollm2-135m"
    assert command[command.index("--head") + 1] == str(tmp_path)
    assert command[command.index("--device") + 1] == "cpu"


def test_it_imports_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """The fault: `multiprocessing.py` in the folder where the gateway was started, which may be
    another user's, ran as the learner."""
    (tmp_path / "multiprocessing.py").write_text("raise SystemExit(99)")
    head = tmp_path / "head"
    head.mkdir()
    command = learner_command(tmp_path, "packaged:target", None, str(head), 5, 0.25, 8192, "cpu")
    start = [*command[:4], str(os.getpid()), "platform"]
    assert subprocess.run(start, cwd=tmp_path, timeout=60, check=False).returncode == 0


GATEWAY = """
import asyncio, sys
from app.learning.learner_process import LearnerProcess

async def live():
    async with LearnerProcess(lambda: sys.argv[1:]) as learner:
        learner.start()
        await asyncio.sleep(60)

asyncio.run(live())
"""
LEARNER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(" ".join([str(os.getpid()), *sys.argv]))
time.sleep(60)
"""


def test_it_ends_when_the_gateway_is_killed(tmp_path: Path) -> None:
    """With the command of the real one, and another module in its place."""
    (tmp_path / "stand_in_learner.py").write_text(LEARNER)
    told = tmp_path / "told"
    head = tmp_path / "head"
    head.mkdir()
    command = learner_command(told, "packaged:target", None, str(head), 5, 0.25, 8192, "cpu")
    assert command[1:4] == ["-P", "-m", "drafters.parent_death"]
    assert command[5] == "drafters.train.learner"
    start = (
        f"import os, sys; sys.argv[1] = str(os.getppid()); sys.path.insert(0, {str(tmp_path)!r})"
    )
    run = "from drafters.parent_death import main; main()"
    stand_in = [sys.executable, "-c", f"{start}; {run}", "parent", "stand_in_learner", *command[6:]]
    gateway = subprocess.Popen([sys.executable, "-c", GATEWAY, *stand_in])
    until(lambda: told.exists() and told.read_text() != "")
    pid, _, *arguments = told.read_text().split()
    asked = f"{told} --target packaged:target --head {head} --k 5 --forever --share 0.25"
    assert " ".join(arguments) == f"{asked} --max-length 8192 --device cpu"
    learner = psutil.Process(int(pid))
    gateway.kill()
    gateway.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        learner.wait(10)
    assert not learner.is_running() or learner.status() == psutil.STATUS_ZOMBIE
