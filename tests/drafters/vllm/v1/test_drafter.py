"""What a drafter pass attends to, from the arrival of requests to their end (scheduler_harness.py).

Every key was computed for its own position, from the token behind it and the target's hidden
state at it.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.drafters.vllm.scheduler_harness import K_MAX, LONGEST, SchedulerHarness, configuration


@pytest.fixture(scope="module", params=["p-eagle", "eagle3"])
def config(request: pytest.FixtureRequest) -> VllmConfig:
    return configuration(head=request.param)


def live(config: VllmConfig, seed: int, steps: int = 250) -> Counter[str]:
    """Random arrivals, aborts, K (in stretches too), acceptance and shape of cache and store."""
    random = Random(seed)
    harness = SchedulerHarness(
        config,
        seed=seed,
        window=random.choice([2, 3, 6, 12]),  # less and more than a block
        blocks=random.choice([22, 30, 60]),  # 22 and 30: not enough for all
        letters=random.choice([1, 2, 50]),  # few: texts agree by chance, and fork
        context=random.choice([0, 0, 9, 24]),
    )
    k, left = 0, 0
    for step in range(steps):
        if step < 3 or (random.random() < 0.25 and harness.alive() < 7):
            harness.arrive()
        if random.random() < 0.02:
            harness.abort()
        if left == 0:
            left = random.choice([1, 1, 1, 4, 10])
            k = random.choice([0, random.randint(0, K_MAX)])
        left -= 1
        harness.step(k)
    return harness.seen


@pytest.mark.slow
def test_whatever_is_attended_to_was_entered(config: VllmConfig) -> None:
    """Catches: a hole attended to; a block that kept its mark when it changed hands; a state from
    a wrong place of the ring; a drafted token that was rejected and stayed; a table row of
    another request; a pass longer than its buffers; a context that is longer than its limit."""
    seen: Counter[str] = Counter()
    for seed in range(24):
        seen += live(config, seed)
    # Every danger was met, or the test says nothing.
    dangers = "hits preempted resumed anew held aborted rejected limited cut"
    for danger in dangers.split():
        assert seen[danger] > 50, f"{danger}: {seen[danger]}"
    assert seen["passes"] > 1000
    assert (seen["followed"] > 1000) == (not config.speculative_config.parallel_drafting)
    # Keys that differ by the next token at a block's end come from vLLM's cache alone, seldom.
    assert seen["forked"] < 0.02 * seen["passes"]


def test_one_text_has_no_forks(config: VllmConfig) -> None:
    """Catches: a next token that is wrong at a block's end and taken for a fork. Where every
    request has one text, nothing can fork."""
    harness = SchedulerHarness(config, seed=1, window=6, blocks=30, letters=1)
    for step in range(200):
        if harness.alive() < 4:
            harness.arrive()
        harness.step(step % (K_MAX + 1))
    assert harness.seen["hits"] > 10 and harness.seen["forked"] == 0


def test_a_back_off_is_caught_up_with(config: VllmConfig) -> None:
    """Catches: a store that catches up from a wrong end, or never. A pause that the store can
    hold loses nothing of a request; a longer one loses what lies before a whole block."""
    size = config.cache_config.block_size
    for pause, lost in ((5, False), (20, True)):  # six tokens at most, and at least twenty
        harness = SchedulerHarness(config, seed=3, window=6, blocks=60)
        harness.arrive(prompt=8, most=40)
        harness.step(1)
        for _ in range(pause):
            harness.step(0)
        harness.step(K_MAX)
        first = int(harness.drafter.entered.context_start[0])
        assert (first > 0) == lost and first % size == 0
        entered = harness.drafter.entered
        assert int(entered.start[0]) == max(first, 8)
        missed = int(entered.num_computed_tokens[0]) - max(first, 8)
        assert harness.drafter.missed_tokens_read == missed > 0
        harness.step(0)
        assert harness.drafter.missed_tokens_read == 0


def test_a_request_without_drafts_costs_no_pass(config: VllmConfig) -> None:
    """Catches: a pass for a request that may have no drafts."""
    harness = SchedulerHarness(config, seed=4, window=6, blocks=60)
    harness.arrive(prompt=8, most=10, limit=0)
    for _ in range(8):
        harness.step(K_MAX)
    assert harness.drafter.passes == 0


def test_nothing_is_drafted_beyond_a_length_that_vllm_lowers(config: VllmConfig) -> None:
    """Catches: the length of the start kept, where vLLM fits it to the memory (max_model_len -1)
    after the drafter is built: drafts whose positions lie behind the end of the block table."""
    harness = SchedulerHarness(config, seed=1, window=6, blocks=60)
    lowered = LONGEST // 2
    for drafters_own in (None, LONGEST):  # a head's own largest length stays as it is
        draft_config = SimpleNamespace(max_model_len=drafters_own)
        harness.speculative_config = SimpleNamespace(draft_model_config=draft_config)
        GPUModelRunner.update_max_model_len(harness, lowered)
        assert harness.drafter.longest == lowered
    harness.scheduler.max_model_len = lowered
    harness.arrive(prompt=8, most=LONGEST)
    furthest = 0
    while harness.alive():
        harness.step(K_MAX)
        rows = harness.drafter.entered
        furthest = max(furthest, int((rows.end + rows.k).max()))
    assert furthest == lowered - 1
    (text,) = harness.known.values()
    assert len(text) >= lowered


@pytest.mark.parametrize("k", [0, 2])
def test_places_are_reserved_for_what_may_be_asked_for(config: VllmConfig, k: int) -> None:
    """At K = 0 a request has the blocks that it has without a drafter: none for the largest K."""
    harness = SchedulerHarness(config, seed=1, window=6, blocks=60)
    harness.arrive(prompt=4, most=40)
    (name,) = harness.requests
    manager, size = harness.scheduler.kv_cache_manager, harness.block_size
    for _ in range(12):
        before = harness.requests[name].num_computed_tokens
        harness.step(k)
        read = (1 if before else 4) + harness.scheduler.recorder.recent[-1].load.draft_tokens
        (blocks,) = manager.get_block_ids(name)
        assert len(blocks) == -(-(before + read + k) // size)
