"""Child processes end with their parent, in whatever way the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]
GONE_WITHIN_S = 10.0

# An engine core with a worker, as vLLM makes them: forked by a thread that is not the main one.
# Each handles SIGTERM, and is stuck in native code that holds the interpreter's lock.
FORKING = r"""
import ctypes, multiprocessing, os, signal, sys, threading
from drafters.parent_death import children_end_with_this_process
context = multiprocessing.get_context("fork")

def stuck():
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.write(1, b"%d\n" % os.getpid())  # both lines whole
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock

def core():
    context.Process(target=stuck).start()
    stuck()

def launch():
    with children_end_with_this_process():
        context.Process(target=core).start()
    end.wait()

end = threading.Event()
thread = threading.Thread(target=launch, daemon=True)
thread.start()
os.read(0, 1)  # unlike sys.stdin it holds no lock that a forked child would wait for
os._exit(0)
"""

# What `spawn` runs first in a child is the script that started the parent. It imports app.cli.
SPAWNING = """
import multiprocessing, time
import app.cli

class Slow:
    def __reduce__(self):  # imports that take minutes, before the target is called
        return exec, ("import os, time; print(os.getpid(), flush=True); time.sleep(600)",)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=print, args=(Slow(),)).start()
    time.sleep(600)
"""

# What starts the command in the background and ends: a login over SSH, a script.
STARTING = """
import subprocess, sys, time
command = "import os, time; import app.cli; print(os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", command])
time.sleep(600)
"""

# A parent that has gone before its child asks for the signal.
LATE = """
import os, time
from drafters.parent_death import end_with_parent
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
print(os.getpid(), flush=True)
end_with_parent(parent)
print("goes on", flush=True)
"""


class Parent:
    """A process that runs a script, and the children whose ids the script printed."""

    def __init__(self, script: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self.children: list[psutil.Process] = []

    def read_children(self, count: int) -> None:
        assert self.process.stdout is not None
        for _ in range(count):
            self.children.append(psutil.Process(int(self.process.stdout.readline())))

    def assert_gone(self) -> None:
        self.process.wait(GONE_WITHIN_S)
        until(lambda: not any(map(running, self.children)), GONE_WITHIN_S, "children outlive it")


def running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def parents() -> Iterator[list[Parent]]:
    started: list[Parent] = []
    yield started
    for parent in started:
        for process in (parent.process, *parent.children):
            if isinstance(process, subprocess.Popen) or running(process):
                process.kill()
        parent.process.communicate()


def start(parents: list[Parent], folder: Path, source: str, children: int) -> Parent:
    script = folder / "parent.py"
    script.write_text(source)
    parents.append(Parent(script))
    parents[-1].read_children(children)
    return parents[-1]


def printed(code: str) -> list[str]:
    """The words that a process prints that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60,
        check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize(
    "end",
    [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGSEGV, None],
    ids=str,
)
def test_forked_children_and_theirs_end(
    parents: list[Parent], tmp_path: Path, end: signal.Signals | None
) -> None:
    parent = start(parents, tmp_path, FORKING, children=2)
    if end is not None:
        parent.process.send_signal(end)
    else:  # it ends by itself
        assert parent.process.stdin is not None
        parent.process.stdin.write("\n")
        parent.process.stdin.flush()
    parent.assert_gone()


def test_the_end_of_a_child_ends_its_own(parents: list[Parent], tmp_path: Path) -> None:
    """An engine core that the system kills for want of memory takes its workers along."""
    parent = start(parents, tmp_path, FORKING, children=2)
    core, worker = sorted(parent.children, key=lambda process: process.create_time())
    if worker.ppid() != core.pid:  # made within one tick of the clock
        core, worker = worker, core
    core.kill()
    until(lambda: not running(worker), GONE_WITHIN_S)
    assert running(psutil.Process(parent.process.pid))


def test_a_spawned_child_ends_while_it_still_imports(parents: list[Parent], tmp_path: Path) -> None:
    parent = start(parents, tmp_path, SPAWNING, children=1)
    parent.process.kill()
    parent.assert_gone()


def test_the_command_outlives_what_started_it(parents: list[Parent], tmp_path: Path) -> None:
    """The fault: a gateway that was started with nohup was killed at the end of the login."""
    parent = start(parents, tmp_path, STARTING, children=1)
    parent.process.kill()
    parent.process.wait(GONE_WITHIN_S)
    [command] = parent.children
    with pytest.raises(psutil.TimeoutExpired):
        command.wait(1.0)


def test_a_parent_that_has_gone_before_is_noticed() -> None:
    words = printed(LATE)
    assert len(words) == 1 and words[0].isdigit(), words


def test_other_threads_children_are_left_alone() -> None:
    """The signal comes with the end of a thread: a pool's children would go with a passing one."""
    code = """
import os, threading, time
from drafters.parent_death import children_end_with_this_process
def fork():
    if (child := os.fork()) == 0:
        time.sleep(0.5)  # the thread has ended
        os._exit(7)
    children.append(child)
children = []
with children_end_with_this_process():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
"""
    assert printed(code) == ["7"]
