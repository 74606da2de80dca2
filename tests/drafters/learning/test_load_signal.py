from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from drafters.learning import load_signal
from drafters.learning.load_signal import Load, LoadSignal


def test_the_learner_reads_what_the_gateway_wrote(tmp_path: Path):
    assert load_signal.read(tmp_path) is None
    signal = LoadSignal(tmp_path, clock=lambda: 7.0)
    signal.write(3)
    assert load_signal.read(tmp_path) == Load(7.0, os.getpid(), 3)
    assert (tmp_path / load_signal.NAME).stat().st_mode & 0o777 == 0o600
    signal.close()


def test_idle_is_a_gateway_without_requests_or_none():
    now = time.time()
    assert Load(now, os.getpid(), 0).idle()
    assert not Load(now, os.getpid(), 1).idle()
    # It is there, and has not said anything for a while: starved, or it hangs.
    assert not Load(now - 10, os.getpid(), 0).idle()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert Load(now, gone.pid, 5).idle()
