"""Steps of which no request may have drafts."""

from __future__ import annotations

from drafters.control.controller import Controller
from drafters.control.objective import FIXED, Objective
from tests.drafters.vllm.scheduler_harness import K_MAX, SchedulerHarness, configuration


def test_a_step_without_anybody_to_draft_for_is_one_at_k_0() -> None:
    """The fault: it counted as one at the K in force, as /metrics says how many drafts a step
    makes."""
    harness = SchedulerHarness(configuration(), seed=1, blocks=99, window=4)
    harness.arrive(prompt=4, most=20, limit=0)
    for _ in range(3):
        harness.step(K_MAX)
        assert harness.scheduler.recorder.recent[-1].k == 0
    # A prompt that is read beside it, in several steps, will be drafted for.
    harness.arrive(prompt=40, most=20)
    for _ in range(3):
        harness.step(K_MAX)
        assert harness.scheduler.recorder.recent[-1].k


def test_the_state_says_that_nobody_is_drafted_for() -> None:
    """The fault: it had the K in force alone, which page and metrics showed. Its prompt is read in
    two steps."""
    harness = SchedulerHarness(configuration(batched=24), seed=1, blocks=99, window=4)
    scheduler = harness.scheduler
    scheduler.k_policy = Controller(K_MAX, objective=Objective(FIXED, k=K_MAX))
    harness.arrive(prompt=40, most=20, limit=0)
    for _ in range(4):
        harness.step(K_MAX, observed=False)
        state = scheduler.speculation("state", {})
        assert (state["k"], state["batch_k"]) == (K_MAX, 0)
    harness.arrive(prompt=4, most=20)
    harness.step(K_MAX, observed=False)
    assert scheduler.speculation("state", {})["batch_k"] == K_MAX
