"""In which order, and in which process, tests run."""

from __future__ import annotations

from collections import deque
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist", reason="xdist is not installed")

from tests.conftest import place, pytest_xdist_make_scheduler, scope_of


class Worker:
    """A process of xdist: it begins a test when it knows the next one, or that there is none."""

    gateway = SimpleNamespace(id="a process")

    def __init__(self) -> None:
        self.tests: deque[int] = deque()
        self.shutting_down = False

    def send_runtest_some(self, tests: list[int]) -> None:
        self.tests.extend(tests)

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def can_run(self) -> bool:
        return len(self.tests) > 1 or (self.shutting_down and bool(self.tests))


def started(tests: list[str], workers: list[Worker]) -> Any:
    """The scheduler, after every process has collected these tests."""
    config: Any = SimpleNamespace(option=SimpleNamespace(), getvalue=lambda _: ["2*popen"])
    scheduler = pytest_xdist_make_scheduler(config, None)
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    return scheduler


def some_tests(random: Random) -> list[str]:
    return [
        f"test_{file}.py::{n}" for file in range(30) for n in range(random.choice([1, 1, 2, 9]))
    ]


@pytest.mark.parametrize("seed", range(10))
def test_no_file_waits_behind_a_long_one(seed: int) -> None:
    """Catches: a process that keeps two or three files while the other has none."""
    random = Random(seed)
    tests, workers = some_tests(random), [Worker(), Worker()]
    scheduler = started(tests, workers)
    run: list[int] = []
    while able := [worker for worker in workers if worker.can_run]:
        worker = random.choice(able)
        assert len({scope_of(tests[test]) for test in worker.tests}) <= 2
        run.append(worker.tests.popleft())
        scheduler.mark_test_complete(worker, run[-1])
    assert sorted(run) == list(range(len(tests)))


@pytest.mark.parametrize("seed", range(10))
def test_after_a_crash_the_processes_run_all_that_is_left(seed: int) -> None:
    """Catches: a process that waits for ever, since it was given files that had run already."""
    random = Random(seed)
    tests, workers = some_tests(random), [Worker(), Worker()]
    scheduler = started(tests, workers)
    run: set[int] = set()
    steps = 0
    while able := [worker for worker in workers if worker.can_run]:
        worker, steps = random.choice(able), steps + 1
        if steps == len(tests) // 2:
            workers[workers.index(worker)] = another = Worker()
            scheduler.remove_node(worker)
            scheduler.add_node(another)
            scheduler.add_node_collection(another, tests)
            scheduler.schedule()
        else:
            run.add(test := worker.tests.popleft())
            scheduler.mark_test_complete(worker, test)
    assert run == set(range(len(tests)))


def test_the_longest_come_first_and_the_timed_ones_behind_them() -> None:
    order = [
        "tests/e2e/test_default_model.py::a",
        "tests/e2e/test_chat.py::a",  # shares the gateway, like the next ones
        "tests/e2e/test_streaming.py::a",
        "tests/e2e/test_page.py::a",
        "tests/e2e/test_start_paths.py::a",
        "tests/drafters/vllm/test_prefixes.py::a",
        "tests/e2e/test_capture.py::a",
        "tests/drafters/vllm/test_hooks.py::a",
        "tests/e2e/test_admission.py::a",
        "tests/app/test_event_loop.py::a",
        "tests/app/test_cli.py::a",
    ]
    assert sorted(sorted(order), key=place) == order
