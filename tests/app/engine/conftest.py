"""What a launch leaves behind in the process that it is called in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def launch_undone() -> Iterator[None]:
    """A launch changes its process's environment and signal mask, for the processes it starts:
    tests and children that come later have neither."""
    variables, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    os.environ.clear()
    os.environ.update(variables)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
