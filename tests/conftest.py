"""What holds for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# The models of the tests are too small to gain by a second thread, and threads of two processes
# that run tests side by side would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example that takes long on a busy machine is no failure.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in several processes, those of a file run in one, and so do all that are
    marked with the same `xdist_group`."""
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-not-found]

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).split("::")[0]

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_settings() -> Iterator[None]:
    """The caller's settings are the caller's: no gateway that a test starts reads them. What
    tests themselves are told by variables they read when they are collected, before this."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("AERIE_", "SM_VLLM_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """Under `nohup` processes that tests start would ignore SIGHUP, as they should for a user."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
