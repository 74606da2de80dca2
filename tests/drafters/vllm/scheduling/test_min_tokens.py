"""Drafts of requests with `min_tokens`."""

from __future__ import annotations

import pytest
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from drafters.vllm.scheduling.step_output import WorkerStepOutput
from tests.drafters.vllm.scheduler_harness import K_MAX, SchedulerHarness, configuration

LEAST = 12


@pytest.mark.parametrize("accepted", [0, 1, K_MAX])
def test_no_draft_reaches_beyond_min_tokens(accepted: int) -> None:
    """The fault: vLLM held an end token back behind all drafts of a step that began before
    `min_tokens`, also where that was beyond it. An answer that should have ended went on."""
    harness = SchedulerHarness(configuration(head="eagle3"), seed=1, blocks=99, window=4)
    scheduler = harness.scheduler
    harness.arrive(prompt=3, most=30, least=LEAST)
    request = harness.requests["r1"]
    drafted = 0
    while harness.alive():
        scheduled = scheduler.schedule()
        before = request.num_output_tokens
        drafts = len(scheduled.scheduled_spec_decode_tokens.get("r1", ()))
        assert before >= LEAST or before + drafts < LEAST
        drafted += drafts
        output = ModelRunnerOutput(["r1"], {"r1": 0}, [[3] * (1 + min(drafts, accepted))])
        WorkerStepOutput(DraftTokenIds(["r1"], [[3] * K_MAX])).attach(output)
        scheduler.update_from_output(scheduled, output)
    assert drafted > LEAST
    harness.arrive(prompt=3, most=1)
    scheduler.schedule()
    assert not scheduler._least, "what has ended is forgotten"
