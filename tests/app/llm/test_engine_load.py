"""The engine's load: sums over schedulers, and figures that are too old to count."""

from __future__ import annotations

from app.admission.controller import AdmissionController
from app.llm.engine_load import STALE_S, EngineLoad
from app.settings import load as load_settings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_figures_of_several_schedulers() -> None:
    load = EngineLoad(clock=Clock())
    load.update(0, running=3, queued=1, deferred=2, kv_usage=0.2)
    load.update(1, running=1, queued=4, deferred=0, kv_usage=0.7)
    assert (load.waiting, load.queued, load.kv_usage) == (7, 5, 0.7)
    load.clear()
    assert (load.waiting, load.kv_usage) == (0, 0.0)


def test_an_engine_that_says_nothing_any_more_has_nothing_to_do() -> None:
    """The last figures before it fell idle must not hold requests back for ever."""
    clock = Clock()
    load = EngineLoad(clock=clock)
    load.update(0, running=3, queued=9, deferred=0, kv_usage=1.0)
    clock.now += STALE_S + 0.1
    assert (load.queued, load.kv_usage) == (0, 0.0)
    assert load.waiting == 9, "who waits for an engine that is stuck has not begun"


def test_what_makes_the_engine_saturated() -> None:
    load = EngineLoad(capacity=8)
    queue = AdmissionController(load_settings({"max_kv_usage": "0.9"}, {}), load).queue
    assert queue.slots() == 9
    for queued, deferred, kv_usage, saturated in (
        (0, 0, 0.5, False),
        (1, 0, 0.5, False),
        (2, 0, 0.5, True),
        (0, 9, 0.5, False),  # compiling somebody's grammar is no lack of room
        (0, 0, 0.9, True),
    ):
        load.update(0, running=1, queued=queued, deferred=deferred, kv_usage=kv_usage)
        assert queue.saturated() is saturated, (queued, deferred, kv_usage)


def test_every_step_calls_on_step() -> None:
    seen: list[int] = []
    load = EngineLoad(on_step=lambda: seen.append(1))
    load.update(0, 1, 0, 0, 0.1)
    assert seen == [1]


def test_a_copy_has_its_part_of_the_capacity() -> None:
    assert EngineLoad(capacity=512, copies=4).copy_capacity == 128
    assert EngineLoad(capacity=512).copy_capacity == 512
