"""What a killed engine leaves behind."""

from __future__ import annotations

import subprocess
import sys
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
