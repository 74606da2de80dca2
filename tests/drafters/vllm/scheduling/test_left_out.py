"""Drafts of requests that a step leaves out, as its tokens ended before them."""

from __future__ import annotations

import pytest
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from drafters.config import DrafterConfig
from drafters.vllm.scheduling.step_output import WorkerStepOutput
from tests.drafters.vllm.scheduler_harness import (
    K_MAX,
    SEQUENCES,
    Grammar,
    SchedulerHarness,
    configuration,
)

HEAD_K = 2


def test_drafts_of_a_request_that_was_left_out_are_of_their_source() -> None:
    """Every draft is a lookup's. The fault: those of a request that was left out of a step counted
    as the head's, of which there are never so many: an IndexError ended the engine."""
    config = configuration(batched=16, head="eagle3")
    config.additional_config = DrafterConfig(head_tokens=HEAD_K, lookup_tokens=K_MAX).entry()
    harness = SchedulerHarness(config, seed=1, blocks=99, window=4)
    scheduler = harness.scheduler
    for _ in range(SEQUENCES):
        harness.arrive(prompt=3, most=4)
    left_out = 0
    while harness.alive():
        scheduled = scheduler.schedule()
        assert scheduler._sources.keys() <= scheduler.requests.keys()
        names = list(scheduled.num_scheduled_tokens)
        left_out += sum(name not in names for name in scheduler.requests)
        offered = scheduled.scheduled_spec_decode_tokens
        output = ModelRunnerOutput(
            names, {name: row for row, name in enumerate(names)}, [[3] for _ in names]
        )
        drafts = DraftTokenIds(names, [[3] * K_MAX for _ in names])
        WorkerStepOutput(drafts, head_k=0, looked_up=tuple(names)).attach(output)
        scheduler.update_from_output(scheduled, output)
        scheduler.recorder.tell(scheduler.k_policy)
        step = scheduler.recorder.recent[-1]
        drafted = sum(sum(source.drafted) for source in step.others)
        assert drafted == sum(map(len, offered.values()))
        assert not any(step.drafted)
    assert left_out


@pytest.mark.parametrize("kept", [0, 2])
def test_drafts_that_were_cut_count_where_the_others_are_verified(kept: int) -> None:
    """The harness checks the counts of each step. The fault: a request that was left out forgot
    what its grammar had cut of its drafts, and acceptance was too high."""
    config = configuration(batched=16, head="eagle3")
    harness = SchedulerHarness(config, seed=1, blocks=99, window=4)
    for _ in range(SEQUENCES - 1):
        harness.arrive(prompt=3, most=8)
    harness.arrive(prompt=3, most=8, grammar=Grammar(lambda drafts: min(kept, drafts)))
    while harness.alive():
        harness.step(K_MAX)
    assert harness.seen["cut and left out"] and harness.seen["cut by a grammar"]


def test_a_preempted_request_loses_the_drafts_that_were_cut() -> None:
    """Catches: they count in the step that reads its tokens anew, though nobody drafts for it."""
    harness = SchedulerHarness(configuration(batched=48), seed=1, blocks=14, window=4)
    for _ in range(2):
        harness.arrive(prompt=8, most=30)
    harness.arrive(prompt=8, most=30, grammar=Grammar(lambda _: 0))
    waited = 0
    while harness.alive():
        cut_before = set(harness.cut)
        preempted_before = harness.seen["preempted"]
        harness.step(K_MAX)
        waited += bool(cut_before) and harness.seen["preempted"] > preempted_before
    assert waited
