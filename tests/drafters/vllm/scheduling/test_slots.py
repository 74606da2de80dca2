"""A step's requests are charged for the slots of the K in force, on vLLM's own scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.structured_output import StructuredOutputManager

from bench.simulate.fixed import Fixed
from drafters.config import LOOKUP
from drafters.vllm.scheduling.scheduler import DraftingScheduler
from tests.drafters.vllm.scheduler_harness import K_MAX, SEQUENCES, SchedulerHarness, configuration

BUDGET, RUNNING = 32, SEQUENCES - 1


class Recorded(SchedulerHarness):
    """Keeps what was scheduled in the last step."""

    def _run(self, scheduled: SchedulerOutput) -> Any:
        self.scheduled = scheduled
        return super()._run(scheduled)


def decoding(head: str, k: int) -> Recorded:
    """Requests that decode with K drafts each, of which none is accepted."""
    harness = Recorded(configuration(batched=BUDGET, head=head), seed=1, blocks=99, window=4)
    harness.accept = lambda drafts: 0
    for _ in range(RUNNING):
        harness.arrive(prompt=3, most=20)
    for _ in range(3):
        harness.step(k)
    return harness


@pytest.mark.parametrize(
    ("head", "k", "prompt"),
    [
        # The decodes' tokens, and of a P-EAGLE head K - 1 slots of each request, the prompt too.
        ("p-eagle", 0, BUDGET - RUNNING),
        ("p-eagle", 1, BUDGET - 2 * RUNNING),
        ("p-eagle", 3, BUDGET - 4 * RUNNING - 2 * SEQUENCES),
        ("p-eagle", K_MAX, BUDGET - (K_MAX + 1) * RUNNING - (K_MAX - 1) * SEQUENCES),
        ("eagle3", K_MAX, BUDGET - (K_MAX + 1) * RUNNING),
    ],
)
def test_a_prompt_gets_what_the_drafts_in_force_leave(head: str, k: int, prompt: int) -> None:
    """The fault: at K = 0 too every request was charged for K_MAX - 1 slots."""
    harness = decoding(head, k)
    harness.arrive(prompt=40, most=2)
    harness.step(k)
    tokens = harness.scheduled.num_scheduled_tokens
    assert len(tokens) == (SEQUENCES if prompt > 0 else RUNNING)
    assert tokens.get(f"r{SEQUENCES}", 0) == max(0, prompt)


@pytest.mark.parametrize(("head", "kept"), [("p-eagle", 3), ("eagle3", 3), (LOOKUP, 0)])
def test_a_head_alone_has_slots_of_the_kv_cache_reserved(head: str, kept: int) -> None:
    """The fault: a lookup had K of them for each request, and nothing writes there."""
    harness = decoding("eagle3", 0)
    config = configuration(batched=BUDGET, head=head)
    config.cache_config.num_gpu_blocks = 99
    scheduler = DraftingScheduler(
        config, harness.kv_cache_config, StructuredOutputManager(config), harness.block_size
    )
    scheduler.k_policy = Fixed(3, K_MAX)  # type: ignore[assignment]
    scheduler.schedule()
    assert scheduler.num_lookahead_tokens == kept


@pytest.mark.parametrize("v2", [False, True])
def test_a_larger_k_is_cut_to_what_fits_behind_a_full_step(v2: bool) -> None:
    """The policy chooses K after a step was filled by the smaller one of before: the pass must
    still fit the drafter's buffers. The next step leaves it room."""
    harness = decoding("p-eagle", 0)
    scheduler = harness.scheduler
    scheduler.use_v2_model_runner = v2
    chosen = iter([K_MAX, K_MAX])
    harness.told.choose = lambda load: next(chosen)  # type: ignore[method-assign]
    harness.arrive(prompt=40, most=2)
    full = scheduler.schedule()
    assert full.total_num_scheduled_tokens == BUDGET  # as at K = 0
    assert full.num_spec_tokens_to_schedule == 1  # which needs no slots
    assert scheduler._reserved_k == K_MAX


@pytest.mark.parametrize(
    ("v2", "room", "k"),
    [(False, 3 * SEQUENCES, 4), (True, 3 * SEQUENCES, 3), (True, 4 * SEQUENCES, 5), (True, 3, 1)],
)
def test_what_fits_is_among_the_captured(v2: bool, room: int, k: int) -> None:
    """On V2, K = 4 has no CUDA graph."""
    harness = decoding("p-eagle", 0)
    harness.scheduler.use_v2_model_runner = v2
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens = dict.fromkeys("abcd", 1)
    scheduled.total_num_scheduled_tokens = BUDGET - room
    assert harness.scheduler._fitting(scheduled, K_MAX) == k
