"""What holds for every test."""

from __future__ import annotations

import asyncio
import inspect
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


# Files of tests/e2e that need nothing of the shared gateway; the others run in one process.
OWN_GATEWAYS = {
    f"tests/e2e/test_{name}.py"
    for name in (
        "admission", "capture", "damaged_weights", "default_model", "engine_loss", "faults",
        "lifetime", "model_free", "sagemaker", "start_paths",
    )
}  # fmt: skip
SHARED = "tests/e2e/conftest.py"  # starts the shared gateway, and names the scope of its tests

# What takes minutes, longest first: begun at the end, it would leave the other process idle. A
# folder stands for its files that have no place of their own.
FIRST = [
    "tests/e2e/test_default_model.py", "tests/drafters/vllm/verification/test_samples.py",
    SHARED,
    "tests/e2e/test_start_paths.py", "tests/app/engine/heads/test_in_engine.py",
    "tests/drafters/vllm/v2/test_v2.py", "tests/drafters/vllm/v1/test_swap_streams.py",
    "tests/drafters/vllm/v2/test_texts.py", "tests/drafters/vllm/scheduling/test_back_off.py",
    "tests/drafters/train/test_recipe.py", "tests/drafters/vllm/v1/test_fuzz.py",
    "tests/drafters/vllm/v1/test_heads.py", "tests/drafters/vllm/test_prefixes.py",
    "tests/drafters/vllm/test_head_swap.py", "tests/drafters/vllm/v2/test_sampled_texts.py",
    "tests/drafters/vllm/v1/test_published.py", "tests/e2e/", "tests/drafters/vllm/",
]  # fmt: skip
# What is measured against the clock, behind what compiles on every core.
TIMED = [
    "tests/drafters/train/learner/test_parent.py", "tests/e2e/test_admission.py",
    "tests/app/test_event_loop.py", "tests/app/observability/test_scrape.py",
    "tests/drafters/control/test_controller.py", "tests/e2e/test_page.py",
]  # fmt: skip


def scope_of(nodeid: str) -> str:
    """The tests that run in one process: those of a file, or all that share the gateway."""
    file = nodeid.split("::")[0]
    return SHARED if file.startswith("tests/e2e/") and file not in OWN_GATEWAYS else file


def place(nodeid: str) -> tuple[int, bool]:
    """Where a test is run: in the order of FIRST and TIMED, before the others. The shared
    gateway's timed tests are its last ones."""
    scope, order = scope_of(nodeid), [*FIRST, *TIMED]
    matches = [name for name in order if scope.startswith(name)]
    rank = order.index(max(matches, key=len)) if matches else len(order)
    return rank, nodeid.startswith(tuple(TIMED))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that have a place in front; those of one place stay in order."""
    items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in several processes, those of a scope run in one: in the order of
    collection, not by how many there are. (The groups of xdist 3.8 are void under pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-not-found]

    config.option.loadscopereorder = False

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _reschedule(self, node: Any) -> None:
            """Give a process another scope when it has one test left, which it does not begin
            before it knows the next one. xdist does so at two tests, and a process would keep two
            or three scopes behind a long one while the other has none.

            A crashed process leaves scopes behind that have run: hence a loop, which ends with two
            tests, or with no scope and the process's shutdown."""
            while not node.shutting_down and (
                not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1
            ):
                super()._reschedule(node)

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
