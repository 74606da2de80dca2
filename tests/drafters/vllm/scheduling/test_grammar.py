"""Acceptance where a grammar cuts drafts before they are verified: a draft that is cut is a
rejection, and a step whose drafts were cut is still a step at its K."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import cycle

import pytest
from vllm.config import VllmConfig

from bench.simulate.fixed import Fixed
from drafters.control.acceptance import Acceptance
from drafters.control.policy import Step
from drafters.control.tuning import Tuning
from tests.drafters.vllm.scheduler_harness import K_MAX, Grammar, SchedulerHarness, configuration

K = 3


class Learning(Fixed):
    """Learns acceptance, as the controller does."""

    def __init__(self) -> None:
        super().__init__(0, K_MAX)
        self.acceptance = Acceptance(K_MAX, Tuning())

    def observe(self, step: Step) -> None:
        self.acceptance.observe(step.load.requests, step.drafted, step.accepted)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return configuration()


def served(
    config: VllmConfig, keep: Callable[[int], int], accept: Callable[[int], int], *, free: bool
) -> tuple[SchedulerHarness, list[float]]:
    """Two requests at a time, both with a grammar or one of them `free`; the rates learned."""
    harness = SchedulerHarness(config, seed=2, window=6, blocks=120)
    harness.scheduler.k_policy = harness.told = policy = Learning()
    harness.accept = accept
    grammars = cycle([Grammar(keep), None if free else Grammar(keep)])
    for _ in range(300):
        while harness.alive() < 2:
            harness.arrive(prompt=4, most=40, grammar=next(grammars))
        harness.step(K)
    return harness, policy.acceptance.conditional()[:K]


def by_turns(*values: int) -> Callable[[int], int]:
    """Each of the values in turn, or all drafts where those are fewer."""
    turns = cycle(values)
    return lambda drafts: min(drafts, next(turns)) if drafts else 0


def every(drafts: int) -> int:
    return drafts


def test_a_grammar_that_rejects_every_second_draft_halves_acceptance(config: VllmConfig) -> None:
    """The fault: what was left had a rate of 1, and K grew for drafts that were thrown away."""
    harness, rates = served(config, by_turns(K, 0), every, free=False)
    assert harness.seen["cut by a grammar"] > 100
    assert rates[0] == pytest.approx(0.5, abs=0.05)
    assert rates[1:] == pytest.approx([1.0] * (K - 1), abs=0.05)


def test_positions_behind_a_cut_keep_their_own_rates(config: VllmConfig) -> None:
    """Catches: a cut request counted as one with fewer drafts, so that deeper positions look better
    than they are for those that reach them."""
    harness, rates = served(config, by_turns(K, 0), by_turns(1, 2), free=True)
    assert harness.seen["cut by a grammar"] > 50
    first, second = Counter[bool](), Counter[bool]()
    for made, right in harness.verified_drafts:
        first[right > 0] += made > 0
        second[right > 1] += made > 1 and right > 0
    true = [found[True] / found.total() for found in (first, second)]
    assert true[0] < 0.8 and true[1] < 0.6
    assert rates[:2] == pytest.approx(true, abs=0.05)


@pytest.mark.parametrize("kept", [1, 2])
def test_the_first_draft_that_is_cut_is_the_one_rejected(config: VllmConfig, kept: int) -> None:
    _, rates = served(config, lambda _: kept, every, free=False)
    assert rates[kept] < 0.1 and min(rates[:kept]) > 0.9


def test_cut_steps_are_steps_at_their_k(config: VllmConfig) -> None:
    """The fault: a step that verified fewer drafts than K taught the policy no cost of K."""
    harness, _ = served(config, lambda _: 1, every, free=False)
    steady = list(harness.scheduler.recorder.recent)[-20:]
    depths = [step.load.draft_tokens / step.load.requests for step in steady]
    assert depths.count(K) > 10


def test_a_request_that_ends_while_its_drafts_wait_counts_nowhere(config: VllmConfig) -> None:
    harness = SchedulerHarness(config, seed=2, window=6, blocks=120)
    harness.arrive(prompt=4, most=40, grammar=Grammar(lambda _: 0))
    harness.step(K)
    assert harness.cut
    harness.abort()
    harness.cut = {}
    harness.arrive(prompt=4, most=40)
    harness.step(K)
    assert harness.scheduler.recorder.recent[-1].drafted == (0,) * K_MAX
