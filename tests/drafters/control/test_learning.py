"""What the costs learn from a step, and what they do not."""

from __future__ import annotations

import pytest

from drafters.control.acceptance import Acceptance
from drafters.control.cost_table import Cell, CostTable
from drafters.control.learning import StepLearner
from drafters.control.policy import Load, SourceCounts, Step
from drafters.control.predictions import Predictor
from drafters.control.read_costs import ReadCosts
from drafters.control.sources.planner import SourcePlanner
from drafters.control.traffic import Traffic
from drafters.control.tuning import Tuning

K_MAX, LOOKUP_TOKENS, CATCH_UP_TOKENS = 3, 10, 256
PLAIN_S, DRAFT_S = 0.010, 0.001  # of a step at K = 0, and more for each K
PROMPT_S = 1e-4  # to read a prompt token


class Learning:
    """A learner of two requests, with all that it teaches."""

    def __init__(self, calibrated: bool = True) -> None:
        tuning, ks = Tuning(), range(K_MAX + 1)
        self.costs, self.read_costs = CostTable(ks, tuning), ReadCosts(tuning)
        if calibrated:
            self.costs.load(Cell(2, k, PLAIN_S + DRAFT_S * k, 100) for k in ks)
        acceptance = Acceptance(K_MAX, tuning)
        self.traffic = Traffic(CATCH_UP_TOKENS, tuning)
        predictor = Predictor(ks, self.costs, acceptance, self.read_costs, self.traffic, tuning)
        planner = SourcePlanner(K_MAX, LOOKUP_TOKENS, 0, acceptance, self.read_costs, tuning)
        self.learner = StepLearner(predictor, self.costs, self.read_costs, self.traffic, planner)

    def see(self, step: Step, times: int = 50) -> None:
        for _ in range(times):
            self.learner.observe(step)
            self.traffic.update_backlog(step)

    def seconds(self, k: int) -> float:
        return self.costs.row(2)[k].seconds


def step(k: int, seconds: float, *, verified: int | None = None, prompts: int = 0) -> Step:
    """A step of two requests that verifies `verified` drafts of each, by default as many as it
    makes."""
    drafts = 2 * (k if verified is None else verified)
    return Step(Load(2, prefill_tokens=prompts, draft_tokens=drafts), k, seconds, 2, (), ())


def test_what_little_is_left_of_a_long_reading_teaches_little() -> None:
    """Catches: 200 ms of reading, priced 4% too high, leave 2 ms of a plain step of 10 ms: its cost
    falls by a third, and the noise of all steps is thought to be as large."""
    learning = Learning()
    learning.traffic.seconds_without_drafts = 1.0
    learning.see(step(0, PLAIN_S + 2000 * PROMPT_S, prompts=2000), times=20)
    before = learning.seconds(0)
    learning.see(step(0, 0.96 * 2000 * PROMPT_S + PLAIN_S, prompts=2000), times=1)
    assert learning.seconds(0) == pytest.approx(before, rel=0.01)


def test_a_steady_step_teaches_the_cost_of_its_k() -> None:
    learning = Learning()
    learning.see(step(2, 0.015))
    assert learning.seconds(2) == pytest.approx(0.015, rel=0.02)


@pytest.mark.parametrize(
    "other",
    [
        step(2, 0.030, verified=1),
        step(2, 0.030)._replace(looked_up=1),
        step(K_MAX, 0.030, verified=LOOKUP_TOKENS),
    ],
    ids=["not steady", "with a lookup", "verifies more than K may be"],
)
def test_other_steps_teach_no_k(other: Step) -> None:
    """Catches, for one: the largest K that learns what verifying ten tokens of a lookup takes."""
    learning = Learning()
    before = [learning.seconds(k) for k in range(K_MAX + 1)]
    learning.see(other)
    assert [learning.seconds(k) for k in range(K_MAX + 1)] == before


def test_a_plain_step_just_after_drafts_teaches_nothing() -> None:
    """Catches: plain steps that are slow after drafts, which made K = 0 look dear."""
    learning = Learning()
    learning.see(step(3, PLAIN_S + 3 * DRAFT_S), times=1)
    before = learning.seconds(0)
    learning.see(step(0, 0.030), times=3)  # less than `settling_s`
    assert learning.seconds(0) == before
    learning.see(step(0, 0.030))
    assert learning.seconds(0) > 0.025


def test_reading_is_no_part_of_a_steady_step() -> None:
    learning = Learning()
    learning.see(step(0, PLAIN_S + 200 * PROMPT_S, prompts=200))
    assert learning.read_costs.target.seconds == pytest.approx(PROMPT_S, rel=0.1)
    assert learning.seconds(0) == pytest.approx(PLAIN_S, rel=0.1)


@pytest.mark.parametrize(
    "drafts",
    [
        {"looked_up": 1},
        {"others": (SourceCounts("lookup", (2, 2), (2, 2)),)},
    ],
    ids=["makes lookups", "verifies lookups"],
)
def test_a_step_with_lookups_teaches_no_price_of_reading(drafts: dict[str, object]) -> None:
    """Catches: verifying ten tokens of a lookup taken for slow reading."""
    learning = Learning()
    learning.see(step(0, 0.060, prompts=50)._replace(**drafts))
    assert learning.read_costs.target.seconds == 0.0


def test_what_a_step_would_have_taken_without_drafts() -> None:
    learning = Learning()
    drafted = step(3, 0.013)._replace(tokens=6)
    assert learning.learner.plain_seconds(drafted) == pytest.approx(3 * PLAIN_S, rel=0.01)
    plain = step(0, 0.012)
    assert learning.learner.plain_seconds(plain) == 0.012
    assert Learning(calibrated=False).learner.plain_seconds(drafted) == 0.013


def test_what_the_head_reads_of_prompts_is_no_part_of_a_plain_step() -> None:
    """No running request may have drafts, and the head reads the prompts of others. Catches: its
    reading taken for decoding, if such a step counts as one at K = 0."""
    learning, head_s = Learning(), 5e-5  # for the head to read a token
    load = Load(2, prefill_tokens=200, requests_by_draft_limit=(0,) * K_MAX)
    draft_s, read_s = 200 * head_s, 200 * (PROMPT_S + head_s)
    learning.see(Step(load, K_MAX, PLAIN_S + read_s, 2, (), (), draft_seconds=draft_s))
    assert learning.seconds(0) == pytest.approx(PLAIN_S, rel=0.1)


def test_costs_grow_older_by_steps_that_teach_none() -> None:
    """Catches: K = 0 that stays certain for ever where every step has a lookup."""
    learning = Learning()
    learning.see(step(0, PLAIN_S), times=500)
    before = learning.costs.row(2)[0].variance
    learning.see(step(0, 0.030)._replace(looked_up=1), times=1000)
    assert learning.costs.row(2)[0].variance - before == pytest.approx(
        30.0 * Tuning().cost_noise, rel=0.01
    )
