"""Supervision of an engine with a stand-in for vLLM: deaths, hangs, back-off, the end, stopping."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from prometheus_client import REGISTRY

from app.cli import main
from app.engine import launched_engine, supervisor
from app.engine.configuration.runner import V2, Blame, StartPath
from app.engine.hang_detector import HangDetector
from app.engine.restart_policy import RestartPolicy
from app.engine.start_failure import Fallback, StartFailureError
from app.engine.supervisor import Engine, Phase
from app.errors import EngineLostError, StartupError
from app.settings import load
from drafters.vllm.error_report import FILE, ErrorReport
from tests.waiting import soon

IN_TIME_S = 20.0
Act = Callable[[], Awaitable[None] | None]
Wait = Callable[[], Awaitable[None]]


class FakeLlm:
    """What the supervisor asks of an engine."""

    copies = 1

    def __init__(self) -> None:
        self.errored = False
        self.unfinished = dict.fromkeys(range(self.copies), 0)
        self.processes: list[int] = []
        self.model_config = SimpleNamespace(
            max_model_len=2048, dtype="torch.float32", is_multimodal_model=False
        )
        self.output_handler = None
        self.ends: list[str] = []

    def mark_failed(self) -> None:
        self.errored = True
        self.ends.append("marked failed")

    def shutdown(self, timeout: float) -> None:
        self.ends.append("shut down")


class Life:
    """An Engine whose launches are ours to fail, and what became of each. On a GPU it has a head,
    and other paths to start on."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool = False, **settings: Any
    ) -> None:
        given = {"restart_backoff_s": 0, **({"drafter": "a/head"} if on_gpu else {})}
        self.engine = Engine(load({**given, **settings}, {}))
        self.launched: list[FakeLlm] = []
        self.fails: Callable[[int], bool | Exception] = lambda launch: False
        self.readiness: Callable[[FakeLlm], Awaitable[None]] | None = None
        self.steps = SimpleNamespace(outputs=Counter())
        self.paths: list[StartPath] = []
        monkeypatch.delenv(V2, raising=False)
        monkeypatch.setattr(supervisor, "prepare", lambda: not on_gpu)
        monkeypatch.setattr(launched_engine, "launch", self._launch)
        monkeypatch.setattr(launched_engine, "WATCH_INTERVAL_S", 0.005)
        monkeypatch.setattr(self.engine, "_check_readiness", self._check_readiness)

    def _launch(self, settings: Any, load: Any, path: StartPath, wish: bool | None) -> Any:
        self.paths.append(path)
        self.launched.append(FakeLlm())
        if failure := self.fails(len(self.launched)):
            raise failure if isinstance(failure, Exception) else RuntimeError("no memory")
        return self.launched[-1], self.steps

    async def _check_readiness(self, path: StartPath) -> None:
        if self.readiness is not None:
            await self.readiness(self.launched[-1])
        self.engine._enter(Phase.READY)

    def die(self) -> None:
        """The newest engine ends."""
        self.launched[-1].errored = True

    def until(self, happened: Callable[[], Any]) -> Wait:
        async def wait() -> None:
            await soon(happened, IN_TIME_S)

        return wait

    def serving(self, launches: int) -> Wait:
        """Wait until an engine serves after so many launches."""
        return self.until(lambda: len(self.launched) == launches and self.engine.ready)


def run(life: Life, *acts: Act) -> int:
    """Do the acts beside the engine's life, and stop it; returns how often it was announced."""
    announced: list[int] = []

    async def both() -> None:
        running = asyncio.create_task(life.engine.run(lambda: announced.append(1)))
        for act in acts:
            if (waiting := act()) is not None:
                await waiting
        await life.engine.stop()
        await asyncio.wait_for(running, IN_TIME_S)

    asyncio.run(both())
    return len(announced)


def failed_start(life: Life) -> str:
    """What a start that fails tells."""
    asyncio.run(asyncio.wait_for(life.engine.run(lambda: pytest.fail("not ready")), IN_TIME_S))
    assert life.engine.phase is Phase.FAILED
    assert life.engine.ended.is_set()
    assert isinstance(life.engine.failure, StartupError)
    return str(life.engine.failure)


def restarts(reason: str) -> float:
    return REGISTRY.get_sample_value("aerie_engine_restarts_total", {"reason": reason}) or 0.0


def test_a_failed_first_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not tried again: what was asked for cannot be had, and the operator is there to see it."""
    life = Life(monkeypatch)
    life.fails = lambda launch: True
    assert "no memory" in failed_start(life)
    assert len(life.launched) == 1


def test_a_dead_engine_is_buried_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    life, before = Life(monkeypatch), restarts("died")

    def die() -> None:
        life.engine.load.update(0, running=3, queued=2, deferred=0, kv_usage=0.9)
        life.die()
        assert not life.engine.ready, "at once, not at the next look"

    def buried() -> None:
        assert life.launched[0].ends == ["marked failed", "shut down"]
        assert life.engine.load.waiting == 0, "figures of the dead one"
        assert life.engine.max_model_len == 2048

    announced = run(life, life.serving(1), die, life.serving(2), buried)
    assert announced == 1, "a restart is not"
    assert restarts("died") - before == 1
    assert life.engine.failure is None
    assert life.launched[1].ends == ["marked failed", "shut down"]


def test_from_the_death_on_clients_are_told_to_wait_for_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while what is left of the dead engine is ended, which may take half a minute."""
    life, told = Life(monkeypatch), list[int]()
    teardown = life.engine._teardown

    async def slow_teardown() -> None:
        told.append(life.engine.retry_after_s)
        await teardown()

    monkeypatch.setattr(life.engine, "_teardown", slow_teardown)

    def die() -> None:
        life.engine._start_s, life.engine._back_at = 25.0, 0.0
        life.die()

    watched = life.until(lambda: life.engine._supervision.state == "running")
    run(life, watched, die, life.serving(2))
    assert told == [25]


def test_a_restart_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(monkeypatch)
    life.fails = lambda launch: launch in (2, 3)
    run(life, life.serving(1), life.die, life.serving(4))
    assert life.engine.failure is None


def test_a_crash_loop_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life(monkeypatch, max_restarts=3)

    async def crash() -> None:
        running = asyncio.create_task(life.engine.run(lambda: None))
        for launch in range(1, 5):
            await life.serving(launch)()
            life.die()
        await asyncio.wait_for(running, IN_TIME_S)

    asyncio.run(crash())
    assert life.engine.ended.is_set()
    assert life.engine.phase is Phase.FAILED
    assert isinstance(life.engine.failure, EngineLostError)
    assert all(llm.ends == ["marked failed", "shut down"] for llm in life.launched)

    def serve(settings: Any) -> None:
        assert life.engine.failure is not None
        raise life.engine.failure

    monkeypatch.setattr("app.server.run.serve", serve)
    assert main(["serve"]) == 3
    said = capsys.readouterr().err
    assert "4 times" in said
    assert "max_restarts is 3" in said


def test_failed_restarts_are_forgotten_only_by_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each of them takes."""
    life = Life(monkeypatch, max_restarts=2, restart_window_s=0.2)
    life.fails = lambda launch: launch > 1

    def fail_late(*arguments: Any) -> Any:
        if life.launched:
            time.sleep(0.3)
        return life._launch(*arguments)

    monkeypatch.setattr(launched_engine, "launch", fail_late)

    async def crash() -> None:
        running = asyncio.create_task(life.engine.run(lambda: None))
        await life.serving(1)()
        life.die()
        await asyncio.wait_for(running, IN_TIME_S)

    asyncio.run(crash())
    assert isinstance(life.engine.failure, EngineLostError)
    assert len(life.launched) == 3


def test_a_silence_is_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an engine that hangs at its first request each time, restarted for ever."""
    life = Life(monkeypatch, max_restarts=2, restart_window_s=0.3, hang_timeout_s=0.2)

    async def hang(llm: FakeLlm) -> None:
        llm.unfinished = {0: 1}

    life.readiness = hang
    asyncio.run(asyncio.wait_for(life.engine.run(lambda: None), IN_TIME_S))
    assert isinstance(life.engine.failure, EngineLostError)
    assert len(life.launched) >= 3  # a pause of this process counts as service, and costs one more


def load_for_ever() -> NoReturn:
    """As vLLM whose process does not come to an end of loading: wait for it, and raise once it is
    killed."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    process.join()
    raise RuntimeError("Engine core initialization failed")


def test_a_restart_that_hangs_while_it_loads_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MIN_RELOAD_S", 0.1)
    life, before = Life(monkeypatch), restarts("hung")

    def hang(*arguments: Any) -> Any:
        llm, steps = life._launch(*arguments)
        if len(life.launched) == 2:
            monkeypatch.setattr(supervisor, "MIN_RELOAD_S", 600.0)  # the next one has time
            load_for_ever()
        return llm, steps

    monkeypatch.setattr(launched_engine, "launch", hang)
    run(life, life.serving(1), life.die, life.serving(3))
    assert restarts("hung") - before == 1


def report(message: str) -> None:
    """As a process of the newest engine that fails."""
    line = ErrorReport(("builtins.RuntimeError",), f"RuntimeError: {message}", ()).line()
    Path(os.environ[FILE]).write_text(line + "\n")


@pytest.mark.parametrize("first", [True, False])
def test_a_start_that_goes_on_after_a_worker_failed_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, first: bool
) -> None:
    """The fault: with several workers the engine core waits for the first one, which waits for the
    one that failed. A first start never ended, and a restart without the reason."""
    monkeypatch.setattr(launched_engine, "FAILED_LOAD_S", 0.1)
    life = Life(monkeypatch)

    def fail(*arguments: Any) -> Any:
        llm, steps = life._launch(*arguments)
        if len(life.launched) == (1 if first else 2):
            report("rank 1")
            load_for_ever()
        return llm, steps

    monkeypatch.setattr(launched_engine, "launch", fail)
    if first:
        assert failed_start(life) == "RuntimeError: rank 1"
    else:
        run(life, life.serving(1), life.die, life.serving(3))
        assert "it did not start again: RuntimeError: rank 1" in caplog.text


@pytest.mark.parametrize(("after_s", "hang_timeout_s"), [(0.1, 600.0), (600.0, 0.1)])
def test_an_engine_that_hangs_after_a_worker_failed_has_died(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    after_s: float,
    hang_timeout_s: float,
) -> None:
    """The fault: with several workers a step whose second worker failed was a hang without a
    word, after all of `hang_timeout_s`."""
    monkeypatch.setattr(launched_engine, "FAILED_STEP_S", after_s)
    life, before = Life(monkeypatch, hang_timeout_s=hang_timeout_s), restarts("died")

    def fail() -> None:
        report("rank 1")
        life.launched[0].unfinished = {0: 1}

    run(life, life.serving(1), fail, life.serving(2))
    assert restarts("died") - before == 1
    assert "engine lost: it died while serving: RuntimeError: rank 1" in caplog.text


def test_a_hung_engine_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    life, before = Life(monkeypatch, hang_timeout_s=0.1), restarts("hung")

    def hang() -> None:
        life.launched[0].unfinished = {0: 1}  # and no output for it

    run(life, life.serving(1), hang, life.serving(2))
    assert life.launched[0].ends == ["marked failed", "shut down"]
    assert restarts("hung") - before == 1


def test_one_hung_copy_of_the_engine_is_noticed_while_the_others_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: the outputs of the other copies (data-parallel) end the silence of the hung one."""
    monkeypatch.setattr(FakeLlm, "copies", 2)
    life, before = Life(monkeypatch, hang_timeout_s=0.1), restarts("hung")

    async def hang() -> None:
        life.launched[0].unfinished = {0: 1, 1: 1}  # no output for the second one
        while len(life.launched) == 1:
            life.steps.outputs[0] += 1
            await asyncio.sleep(0.001)

    run(life, life.serving(1), hang, life.serving(2))
    assert restarts("hung") - before == 1


def test_an_engine_that_hangs_as_it_starts_again_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = Life(monkeypatch, hang_timeout_s=0.1)

    async def readiness(llm: FakeLlm) -> None:
        if len(life.launched) == 2:
            llm.unfinished = {0: 1}
            await asyncio.sleep(IN_TIME_S)

    life.readiness = readiness
    hung, died = restarts("hung"), restarts("died")
    run(life, life.serving(1), life.die, life.serving(3))
    assert life.launched[1].ends == ["marked failed", "shut down"]
    assert (restarts("hung"), restarts("died")) == (hung + 1, died + 1)


@pytest.mark.parametrize("backoff", [0, 30])
def test_stopping_while_it_restarts_is_quick_and_clean(
    monkeypatch: pytest.MonkeyPatch, backoff: float
) -> None:
    """In the pause before the start, or in the start itself."""
    life = Life(monkeypatch, restart_backoff_s=backoff)

    async def readiness(llm: FakeLlm) -> None:
        if len(life.launched) == 2:
            await _until_shut_down(llm)

    life.readiness = readiness
    wanted = Phase.RESTARTING if backoff else Phase.WARMING
    run(life, life.serving(1), life.die, life.until(lambda: life.engine.phase is wanted))
    assert life.engine.failure is None


async def _until_stopped(llm: FakeLlm) -> None:
    """As a call into vLLM that nobody answers, whatever becomes of the engine."""
    await asyncio.Event().wait()


async def _until_shut_down(llm: FakeLlm) -> None:
    while "shut down" not in llm.ends:  # noqa: ASYNC110 (a fake has no event)
        await asyncio.sleep(0.002)
    raise RuntimeError("it has gone")


@pytest.mark.parametrize("readiness", [_until_stopped, _until_shut_down])
def test_stopping_while_it_first_warms_up_is_quick_and_clean(
    monkeypatch: pytest.MonkeyPatch, readiness: Callable[[FakeLlm], Awaitable[None]]
) -> None:
    life = Life(monkeypatch, on_gpu=True)
    life.readiness = readiness
    run(life, life.until(lambda: life.engine.phase is Phase.WARMING))
    assert life.engine.phase is Phase.STOPPING
    assert life.engine.failure is None
    assert life.launched[0].ends == ["marked failed", "shut down"], "its requests end, then it"
    assert life.paths == ["v2"], "no other is started"


async def test_a_file_system_that_does_not_answer_keeps_no_engine_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "HEADS_STOP_S", 0.05)
    engine, answers = Engine(load({}, {})), threading.Event()
    engine.heads = SimpleNamespace(stopped=answers.wait)  # type: ignore[assignment]
    try:
        await asyncio.wait_for(engine.stop(), IN_TIME_S)
    finally:
        answers.set()


def test_an_engine_that_dies_as_it_first_warms_up_is_a_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if a call into it is never answered."""
    life = Life(monkeypatch)

    async def readiness(llm: FakeLlm) -> None:
        llm.errored = True
        await _until_stopped(llm)

    life.readiness = readiness
    assert "died while it warmed up" in failed_start(life)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_back_off_doubles_up_to_its_bound_and_forgets() -> None:
    clock = Clock()
    settings = load(
        {
            "max_restarts": 6, "restart_window_s": 100,
            "restart_backoff_s": 1, "restart_backoff_max_s": 10,
        },
        {},
    )  # fmt: skip
    policy = RestartPolicy(settings.supervision, clock)
    assert [policy.next_delay_s("it died") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    with pytest.raises(EngineLostError, match=r"7 times within 100 s of service.*at last: it died"):
        policy.next_delay_s("it died")
    clock.now += 101
    assert policy.next_delay_s("it died") == 1


def test_no_restarts_means_none() -> None:
    with pytest.raises(EngineLostError, match="max_restarts is 0"):
        RestartPolicy(load({"max_restarts": 0}, {}).supervision, Clock()).next_delay_s(
            "it died while serving"
        )


def test_silence_counts_only_while_requests_run() -> None:
    clock = Clock()
    hang_detector = HangDetector(10.0, 1.0, clock)

    def check(after_s: float, requests: int, outputs: int) -> bool:
        clock.now += after_s
        return hang_detector.hung(requests, outputs)

    assert not any(check(1, 0, 5) for _ in range(30)), "idle"
    assert not any(check(1, 4, outputs) for outputs in range(6, 36)), "busy"
    assert [check(1, 4, 35) for _ in range(11)] == [False] * 9 + [True] * 2
    assert not check(1, 4, 36), "it goes on"


def test_clients_that_give_up_hide_no_hang() -> None:
    """One that waits for less than the timeout, and tries again a moment later."""
    clock = Clock()
    hang_detector = HangDetector(10.0, 1.0, clock)
    hang_detector.hung(0, 5)

    def check(requests: int) -> bool:
        clock.now += 1
        return hang_detector.hung(requests, 5)

    assert [check(requests) for requests in (*[1] * 6, 0, *[1] * 4)] == [False] * 10 + [True]


def test_what_this_process_has_slept_is_not_the_engines_silence() -> None:
    clock = Clock()
    hang_detector = HangDetector(10.0, 1.0, clock)
    hang_detector.hung(1, 1)
    clock.now += 3600  # stopped with Ctrl-Z, say
    assert not hang_detector.hung(1, 1)


def test_a_defect_of_the_watch_costs_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever its restart trips over, the engine serves again."""
    life = Life(monkeypatch)
    trips = [RuntimeError("a defect"), asyncio.CancelledError()]
    teardown = life.engine._teardown

    async def trip() -> None:
        if trips:
            raise trips.pop()
        await teardown()

    monkeypatch.setattr(life.engine, "_teardown", trip)

    def defect(*arguments: object) -> bool:
        raise RuntimeError("a defect")

    async def watched_in_vain() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(HangDetector, "hung", defect)
            await life.until(lambda: life.engine._supervision.failures == 1)()
        assert life.engine.ready, "nothing is wrong with it"

    run(life, life.serving(1), watched_in_vain, life.die, life.serving(2))
    assert life.engine._supervision.failures == 3
    assert life.engine.failure is None


def test_a_start_that_is_cancelled_from_inside_is_a_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = Life(monkeypatch)

    async def readiness(llm: FakeLlm) -> None:
        raise asyncio.CancelledError

    life.readiness = readiness
    failed_start(life)


def failure(blame: Blame, reason: str) -> StartFailureError:
    return StartFailureError(f"it broke: {reason}", blame, reason)


# Failures of V2 -> the paths that are tried; configuration/test_runner.py has all of them.
@pytest.mark.parametrize(
    ("blame", "reason", "paths"),
    [
        (Blame.UNSUPPORTED, "unsupported", ["v2", "v1"]),
        (Blame.DRAFTS, "refused", ["v2", "no-drafts"]),
        (Blame.RUNNER, "other", ["v2", "v1-eager"]),
        (Blame.HEAD, "head", ["v2", "no-drafts"]),
    ],
)
def test_an_engine_that_does_not_start_is_started_on_the_next_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    blame: Blame, reason: str, paths: list[str],
) -> None:  # fmt: skip
    life = Life(monkeypatch, on_gpu=True)
    life.fails = lambda launch: failure(blame, reason) if launch == 1 else False
    assert run(life, life.serving(2)) == 1
    assert life.paths == paths
    assert life.engine.path == paths[-1]
    assert life.engine.fallback == Fallback(StartPath.V2, reason, f"it broke: {reason}")
    assert life.engine.settings_in_force.speculates == (paths[-1] != "no-drafts")
    told = {"path": paths[-1], "reason": reason}
    assert REGISTRY.get_sample_value("aerie_speculation_path_info", told) == 1
    lines = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert any(f"it broke: {reason}" in line for line in lines), "why it was left"
    assert any(line.startswith(f"speculation path: {paths[-1]},") for line in lines)


def test_what_broke_while_it_warmed_up_is_torn_down_before_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life, blames = Life(monkeypatch, on_gpu=True), [Blame.RUNNER, Blame.DRAFTS]

    async def readiness(llm: FakeLlm) -> None:
        assert all("shut down" in other.ends for other in life.launched if other is not llm)
        if blames:
            raise failure(blames.pop(0), "non_finite")

    life.readiness = readiness
    run(life, life.serving(3), life.die, life.serving(4))
    assert life.paths == ["v2", "v1-eager", "no-drafts", "no-drafts"], "a restart keeps its path"
    assert life.engine.fallback is not None and life.engine.fallback.failed == "v2"


@pytest.mark.parametrize(
    ("strict", "failures", "paths", "told"),
    [
        (False, [failure(Blame.TARGET, "memory")], ["v2"], "^it broke: memory$"),
        (
            False,
            [failure(Blame.RUNNER, "other"), failure(Blame.RUNNER, "ended")],
            ["v2", "v1-eager"],
            "v2: it broke: other; v1-eager: it broke: ended",
        ),
        (True, [failure(Blame.DRAFTS, "memory")], ["v2"], "^it broke: memory$"),
    ],
)
def test_a_failure_that_no_other_path_would_cure_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
    strict: bool,
    failures: list[Exception],
    paths: list[str],
    told: str,
) -> None:
    """With strict speculation none of them would."""
    life = Life(monkeypatch, on_gpu=True, strict_speculation=strict)
    life.fails = lambda launch: failures[launch - 1]
    assert re.search(told, failed_start(life))
    assert life.paths == paths


@pytest.mark.parametrize("answered", [False, True])
def test_an_engine_that_dies_as_it_warms_up_may_work_on_another_runner(
    monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """Whether its end or a call into it is noticed first, and without a report of its own."""
    life = Life(monkeypatch, on_gpu=True)

    async def readiness(llm: FakeLlm) -> None:
        if len(life.launched) == 1:
            llm.errored = True
            if answered:
                raise ConnectionError("it has gone")
            await _until_stopped(llm)

    life.readiness = readiness
    run(life, life.serving(2))
    assert life.paths == ["v2", "v1-eager"]
    assert life.engine.fallback is not None
    assert life.engine.fallback.message == "the engine died while it warmed up"
