"""Which request gives way where the KV cache is full."""

from __future__ import annotations

import pytest

from tests.drafters.vllm.scheduler_harness import K_MAX, SchedulerHarness, configuration


@pytest.mark.parametrize(("policy", "victim"), [("priority", "r1"), ("fcfs", "r3")])
def test_the_lowest_priority_gives_way(policy: str, victim: str) -> None:
    """The fault: the newest request gave way, whatever its priority."""
    config = configuration(batched=48)
    config.scheduler_config.policy = policy
    harness = SchedulerHarness(config, seed=1, blocks=14, window=4)
    harness.arrive(prompt=8, most=30, priority=5)  # vLLM puts smaller numbers first
    harness.step(K_MAX)
    harness.arrive(prompt=8, most=30)
    harness.arrive(prompt=8, most=30)
    while not harness.seen["preempted"]:
        harness.step(K_MAX)
    preempted = [name for name, each in harness.requests.items() if each.num_preemptions]
    assert preempted == [victim]
