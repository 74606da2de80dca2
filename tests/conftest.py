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


# What takes minutes, longest first: begun at the end, it would leave the other process idle.
FIRST = [
    "tests/drafters/vllm/v2/test_v2.py", "tests/drafters/vllm/test_head_swap.py",
    "tests/drafters/vllm/verification/test_samples.py",
    "tests/e2e/test_start_paths.py", "tests/drafters/vllm/v2/test_sampled_texts.py",
    "tests/drafters/vllm/v2/test_texts.py", "tests/drafters/vllm/test_prefixes.py",
    "tests/drafters/vllm/v1/test_heads.py", "tests/drafters/vllm/v1/test_published.py",
    "tests/drafters/train/test_recipe.py", "tests/app/engine/heads/test_in_engine.py",
    "tests/drafters/train/learner/test_parent.py", "tests/e2e/test_default_model.py",
    "tests/e2e/test_engine_loss.py", "tests/e2e/test_damaged_weights.py", "tests/e2e/",
    "tests/drafters/vllm/v1/", "tests/drafters/vllm/",
]  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of FIRST in front; the others stay in order."""

    def place(item: pytest.Item) -> int:
        return next((n for n, name in enumerate(FIRST) if item.nodeid.startswith(name)), len(FIRST))

    items.sort(key=place)


# Files of tests/e2e that need nothing of the shared gateway; the others run in one process.
OWN_GATEWAYS = {
    f"tests/e2e/test_{name}.py"
    for name in (
        "admission", "capture", "damaged_weights", "default_model", "engine_loss", "faults",
        "generations", "lifetime", "model_free", "sagemaker", "start_paths",
    )
}  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in several processes, those of a file run in one, and so do all that share
    the gateway: in the order of collection, not by how many there are. (The groups of xdist 3.8
    are void under pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-not-found]

    config.option.loadscopereorder = False

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            shared = file.startswith("tests/e2e/") and file not in OWN_GATEWAYS
            return "the shared gateway" if shared else file

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
