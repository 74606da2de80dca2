"""Trials of a head in service: what counts, what does not, and how often chance decides."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from app.engine.heads.trial import Trial, TrialPlan
from drafters.learning.lineage import KEPT, ROLLED_BACK

CANDIDATE, INCUMBENT = 7, 4
PLAN = TrialPlan()


class Service:
    """An engine whose speed-up with each generation is ours to say, polled each second."""

    def __init__(self, speedups: dict[int, float], noise: float = 0.0, seed: int = 0) -> None:
        self.speedups, self.noise, self.random = speedups, noise, Random(seed)
        self.decode_s = self.plain_s = 0.0
        self.drafted = 0.0
        self.drafts_per_s = 100.0
        self.tokens, self.tokens_per_s = 0.0, 60.0
        self.drafts_of: dict[int, float] = {}  # instead, by generation
        self.fields: dict[str, Any] = {"objective": "throughput", "k": 5, "tpot_s": None}

    def decode(self, generation: int, seconds: float = 1.0) -> None:
        self.decode_s += seconds
        pace = self.random.gauss(1.0, self.noise) if self.noise else 1.0
        self.plain_s += seconds * self.speedups[generation] * pace
        self.tokens += self.tokens_per_s * seconds
        self.drafted += self.drafts_of.get(generation, self.drafts_per_s) * seconds

    def state(self) -> dict[str, Any]:
        sources = {"head": {"drafted": int(self.drafted), "accepted": 0}}
        totals = {
            "decode_seconds": self.decode_s, "plain_seconds": self.plain_s, "tokens": self.tokens,
            "sources": sources,
        }  # fmt: skip
        return {**self.fields, "totals": totals}


def carried_out(trial: Trial, service: Service, most_s: int = 10_000) -> str | None:
    """Decode until there is a verdict, with the head in force that the trial asks for."""
    in_force = INCUMBENT
    for _ in range(most_s):
        if in_force != trial.drafting:
            in_force = trial.drafting
            trial.begin(service.state())
        service.decode(in_force)
        trial.observe(service.state())
        if (verdict := trial.verdict()) is not None:
            return verdict
    return None


@pytest.mark.parametrize(
    ("speedup", "verdict"), [(1.5, KEPT), (1.0, ROLLED_BACK), (1.2, ROLLED_BACK)]
)
def test_the_better_head_stays(speedup: float, verdict: str) -> None:
    """A candidate that is no better is rolled back, since nothing is shown for it."""
    service = Service({INCUMBENT: 1.2, CANDIDATE: speedup}, noise=0.1)
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    assert carried_out(trial, service) == verdict
    figures = trial.figures()
    assert figures["ratio"] == pytest.approx(speedup / 1.2, rel=0.05)
    low, high = figures["interval"]
    assert low < figures["ratio"] < high


def test_a_clear_case_ends_at_the_first_look() -> None:
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.5}, noise=0.05)
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    assert carried_out(trial, service) == KEPT
    assert trial.figures()["pairs"] == PLAN.looks[0]
    least = 2 * PLAN.looks[0] * (PLAN.period_s + PLAN.settle_s)
    assert least <= service.decode_s <= least + 2 * PLAN.looks[0]


def test_chance_seldom_keeps_a_head_that_is_no_better() -> None:
    """Four looks of 95% each would keep one of 12; here one of 40 is kept, and one rolled back at
    once for being worse."""
    kept = 0
    trials = 300
    for seed in range(trials):
        service = Service({INCUMBENT: 1.2, CANDIDATE: 1.2}, noise=0.3, seed=seed)
        kept += carried_out(Trial(CANDIDATE, INCUMBENT, Random(seed)), service) == KEPT
    assert kept <= 0.025 * trials + 3 * (0.025 * trials) ** 0.5


def test_what_settles_after_a_swap_counts_for_neither() -> None:
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.5})
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    first = trial.drafting
    trial.begin(service.state())
    service.plain_s += 1000.0  # of the head before
    service.decode(first, PLAN.settle_s)
    trial.observe(service.state())
    service.decode(first, PLAN.period_s)
    trial.observe(service.state())
    assert trial.drafting != first
    assert trial._pair == {first: pytest.approx(service.speedups[first])}


def test_idle_seconds_and_steps_without_drafts_count_nothing() -> None:
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.5})
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    first = trial.drafting
    for _ in range(100):
        trial.observe(service.state())
    assert trial.drafting == first
    service.drafts_per_s = 0
    assert carried_out(trial, service, 200) is None
    assert trial.figures()["pairs"] == 0
    assert trial.figures()["interval"] is None


@pytest.mark.parametrize(("drafts_per_s", "period_s"), [(2.5, 20.0), (0.5, 60.0)])
def test_on_a_slow_engine_periods_are_longer_and_the_trial_ends(
    drafts_per_s: float, period_s: float
) -> None:
    """A large target on a CPU: fewer than 50 drafts in 10 s, always."""
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.5}, noise=0.1)
    service.drafts_per_s, service.tokens_per_s = drafts_per_s, drafts_per_s
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    assert carried_out(trial, service) == KEPT
    pairs = trial.figures()["pairs"]
    assert service.decode_s == pytest.approx(2 * pairs * (period_s + PLAN.settle_s), abs=2 * pairs)


def test_probes_alone_are_no_drafts() -> None:
    """At K = 0 with both heads the trial waits: nothing could be shown."""
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.0})
    service.drafts_per_s = 0.02 * service.tokens_per_s
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    assert carried_out(trial, service, 500) is None
    assert trial.figures()["pairs"] == 0


@pytest.mark.parametrize(("drafts", "verdict"), [(CANDIDATE, KEPT), (INCUMBENT, ROLLED_BACK)])
def test_a_head_that_never_drafts_loses_to_one_that_pays(drafts: int, verdict: str) -> None:
    """With one of the heads the policy chooses K = 0: its periods are not waited for."""
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.0, drafts: 1.4}, noise=0.05)
    service.drafts_of = {INCUMBENT: 0, CANDIDATE: 0, drafts: 100}
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    assert carried_out(trial, service, 400) == verdict


@pytest.mark.parametrize(
    "change", [{"objective": "latency", "tpot_s": 0.05}, {"sources": ["head"]}]
)
def test_a_change_of_the_objective_drops_the_pair(change: dict[str, Any]) -> None:
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.5})
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    first = trial.drafting
    while trial.drafting == first:
        service.decode(first)
        trial.observe(service.state())
    trial.begin(service.state())
    service.fields |= change
    service.decode(trial.drafting)
    trial.observe(service.state())
    assert trial._pair == {}
    assert trial.figures()["pairs"] == 0


def test_k_of_an_adaptive_objective_may_change() -> None:
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.5})
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    in_force = INCUMBENT
    for second in range(60):
        service.fields["k"] = second % 5
        if in_force != trial.drafting:
            in_force = trial.drafting
            trial.begin(service.state())
        service.decode(in_force)
        trial.observe(service.state())
    assert trial.figures()["pairs"] == 2


def test_after_an_interruption_the_pair_begins_anew() -> None:
    service = Service({INCUMBENT: 1.0, CANDIDATE: 1.5})
    trial = Trial(CANDIDATE, INCUMBENT, Random(1))
    first = trial.drafting
    while trial.drafting == first:
        service.decode(first)
        trial.observe(service.state())
    trial.interrupt()
    fresh = Service(service.speedups)  # the totals of another engine
    assert carried_out(trial, fresh) == KEPT


def test_the_order_within_pairs_is_drawn() -> None:
    firsts = {Trial(CANDIDATE, INCUMBENT, Random(seed)).drafting for seed in range(20)}
    assert firsts == {CANDIDATE, INCUMBENT}
