"""What a killed engine leaves behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from app.engine.process_cleanup import ProcessCleanup

if not Path("/proc/self/maps").exists():
    pytest.skip("needs Linux's /proc", allow_module_level=True)

# A process with a segment that nobody else has mapped, and a child that does not end with it.
CORE = """
import subprocess, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
segment = SharedMemory(create=True, size=4096)
segment.buf[0] = 1
resource_tracker.unregister(segment._name, "shared_memory")
child = subprocess.Popen([sys.executable, "-c",
    "import time; print(1, flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, segment.name, flush=True)
time.sleep(600)
"""


def test_processes_segments_and_sockets_go(tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    ours = SharedMemory(create=True, size=4096)
    core = subprocess.Popen(
        [sys.executable, "-c", CORE, str(socket)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert core.stdout is not None
        child, name = core.stdout.readline().split()
        segment = Path("/dev/shm") / name
        assert segment.exists()
        assert socket.exists()
        cleanup = ProcessCleanup([core.pid])
        core.kill()  # its child is an orphan now
        core.wait()
        cleanup.run()
        assert not segment.exists()
        assert not socket.exists()
        assert (Path("/dev/shm") / ours.name).exists(), "this process uses it"
        gone = not psutil.pid_exists(int(child))
        assert gone or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE
    finally:
        core.kill()
        if core.stdout is not None:
            core.stdout.close()
        ours.close()
        ours.unlink()


def test_processes_that_have_gone_already() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    ProcessCleanup([done.pid]).run()


# A model whose weights lie in /dev/shm, one file in a folder and one not: mapped as loaders do.
LOADING = """
import mmap, sys, time
maps = [mmap.mmap(open(name, "rb").fileno(), 0, prot=mmap.PROT_READ) for name in sys.argv[1:]]
print(len(maps), flush=True)
time.sleep(600)
"""


def test_weights_that_lie_in_shared_memory_stay() -> None:
    """The fault: a start that failed deleted the model that it had read."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights = [Path(folder) / "model.safetensors", Path(f"{folder}.safetensors")]
        for file in weights:
            file.write_bytes(bytes(4096))
        core = subprocess.Popen(
            [sys.executable, "-c", LOADING, *map(str, weights)], stdout=subprocess.PIPE
        )
        try:
            assert core.stdout is not None
            core.stdout.readline()
            ProcessCleanup([core.pid]).run()
            assert [file.exists() for file in weights] == [True, True]
        finally:
            core.kill()
            core.wait()
            core.stdout.close()
            weights[1].unlink(missing_ok=True)


# Process 1 of a container that does not ask for the exit statuses of the orphans that it gets.
NOT_REAPING = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
shell = subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True)
print(shell.stdout.decode().strip(), flush=True)
time.sleep(600)
"""


def test_a_zombie_that_nobody_reaps_is_not_waited_for() -> None:
    """The fault: each death of an engine with workers took 20 s more."""
    first = subprocess.Popen([sys.executable, "-c", NOT_REAPING], stdout=subprocess.PIPE)
    try:
        assert first.stdout is not None
        orphan = int(first.stdout.readline())
        began = time.monotonic()
        ProcessCleanup([orphan]).run()
        assert time.monotonic() - began < 5.0
        assert psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
