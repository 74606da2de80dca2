"""The time that the policy takes counts in the step that it delays (Step.control_seconds)."""

from __future__ import annotations

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from bench.simulate.fixed import Fixed
from drafters.control.controller import Controller
from drafters.control.objective import OFF, Objective
from drafters.control.policy import Step
from drafters.vllm.scheduling import scheduler, step_recorder
from tests.drafters.vllm.scheduler_harness import K_MAX, SEQUENCES, SchedulerHarness, configuration

LEARNING_S = 0.01


class Slow(Fixed):
    """Takes its time to learn, on a clock that stands still otherwise."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def observe(self, step: Step) -> None:
        self.now += LEARNING_S


@pytest.mark.parametrize(
    ("executor", "max_unobserved_steps", "learned"),
    [
        (UniProcExecutor, 1, [0, 1, 1, 1, 1, 1, 1]),
        (UniProcExecutor, 3, [0, 0, 0, 3, 0, 0, 3]),
        (MultiprocExecutor, 1, [0] * 7),
        (MultiprocExecutor, 3, [0] * 7),
    ],
)
def test_learning_counts_where_nothing_else_runs_meanwhile(
    executor: type,
    max_unobserved_steps: int,
    learned: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configuration()
    config.parallel_config.distributed_executor_backend = executor
    harness = SchedulerHarness(config, seed=1, window=6, blocks=60)
    harness.scheduler.k_policy = harness.told = told = Slow(0, K_MAX)
    told.max_unobserved_steps = max_unobserved_steps
    for module in (scheduler, step_recorder):
        monkeypatch.setattr(module, "perf_counter", told.clock)
    harness.arrive(prompt=4, most=60)
    for _ in learned:
        harness.step(2, observed=False)
    # All of them but the last was learned from, sooner or later.
    assert harness.scheduler.recorder.untold == 1
    harness.scheduler.recorder.tell(harness.scheduler.k_policy)
    found = [step.control_seconds for step in harness.scheduler.recorder.recent]
    assert found == pytest.approx([steps * LEARNING_S for steps in learned])


def test_the_state_has_the_requests_of_now() -> None:
    """Catches: an idle engine that reports the batch of its last step for hours."""
    harness = SchedulerHarness(configuration(), seed=1, window=6, blocks=60)
    harness.scheduler.k_policy = Controller(K_MAX, objective=Objective(OFF))
    for _ in range(SEQUENCES + 1):
        harness.arrive(prompt=4, most=3)
    states = []
    for _ in range(20):
        harness.step(0, observed=False)
        states.append(harness.scheduler.speculation("state", {}))
    busy, idle = states[0], states[-1]
    assert busy["batch"] == busy["requests"] == SEQUENCES + 1 - busy["waiting"] <= SEQUENCES
    assert (idle["batch"], idle["requests"], idle["waiting"]) == (1, 0, 0)
