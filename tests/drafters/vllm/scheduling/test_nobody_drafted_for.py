"""Steps of which no request may have drafts."""

from __future__ import annotations

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
