"""Drafts of requests that a step leaves out, as its tokens ended before them."""

from __future__ import annotations

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from drafters.config import DrafterConfig
from drafters.vllm.scheduling.step_output import WorkerStepOutput
from tests.drafters.vllm.scheduler_harness import (
    K_MAX,
    SEQUENCES,
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
