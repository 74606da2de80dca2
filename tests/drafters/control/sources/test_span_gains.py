"""Gains of forced spans: learnt from every span, drafted or not, against the price of verifying."""

from __future__ import annotations

import pytest

from drafters.control.controller import Controller
from drafters.control.objective import Objective
from drafters.control.policy import Load, Span, Step
from drafters.control.sources.draft_plan import DraftPlan
from drafters.control.sources.span_gains import SpanGains
from drafters.control.tuning import Tuning

MOST = 5
FREE, DEAR = [0.0] * (MOST + 1), [0.5 * n for n in range(MOST + 1)]


def step(*spans: Span) -> Step:
    return Step(Load(1), 0, 0.01, 1, (), (), spans=spans)


def learnt(compared: int, equal: int, steps: int = 400) -> SpanGains:
    gains = SpanGains(MOST, Tuning())
    for _ in range(steps):
        gains.observe(step(Span(compared, equal)))
    return gains


def tokens(gains: SpanGains, prices: list[float], length: int = MOST) -> int:
    return DraftPlan((), spans=gains.gains(prices)).span_tokens(length)


def test_a_span_that_the_target_follows_is_drafted_whole() -> None:
    gains = learnt(MOST, MOST)
    assert gains.gains(FREE)[MOST] == pytest.approx(MOST, rel=0.05)
    assert tokens(gains, DEAR) == MOST and tokens(gains, DEAR, length=2) == 2


def test_a_span_that_it_cuts_otherwise_is_not_drafted_and_can_come_back() -> None:
    gains = learnt(1, 0)
    assert tokens(gains, DEAR) == 0
    for _ in range(3000):  # not drafted: a step makes one token
        gains.observe(step(Span(1, 1)))
    assert tokens(gains, DEAR) > 0


def test_the_price_cuts_a_span_short() -> None:
    """The first two tokens are right, the third never is."""
    assert tokens(learnt(MOST, 2), DEAR) == 2


def test_before_any_span_drafts_are_tried() -> None:
    assert tokens(SpanGains(MOST, Tuning()), [0.1 * n for n in range(MOST + 1)]) == MOST


def test_a_plan_without_spans_drafts_none() -> None:
    assert DraftPlan(()).span_tokens(MOST) == 0


def steady(controller: Controller, steps: int = 12, spans: tuple[Span, ...] = ()) -> None:
    """Let a controller see steps of one request at 10 ms each, none with a draft."""
    for _ in range(steps):
        k = controller.choose(Load(1))
        assert k == 0
        controller.observe(Step(Load(1), 0, 0.01, 1, (), (), spans=spans))


def test_a_policy_without_a_head_plans_lookups_and_spans() -> None:
    controller = Controller(0, lookup_tokens=MOST, span_tokens=MOST)
    assert controller.sources == ("lookup", "grammar")
    steady(controller)
    plan = controller.plan()
    assert plan is not None and plan.span_tokens(MOST) > 0
    assert any(each.tokens for each in plan.lookups)
    assert controller.snapshot()["spans"]["tokens"] > 1.0


def test_each_source_can_be_left_out() -> None:
    controller = Controller(0, lookup_tokens=MOST, span_tokens=MOST)
    controller.set_objective(Objective(sources=("grammar",)))
    steady(controller)
    plan = controller.plan()
    assert plan is not None and plan.span_tokens(MOST) > 0
    assert not any(each.tokens for each in plan.lookups)
    controller.set_objective(Objective(sources=("lookup",)))
    steady(controller)
    plan = controller.plan()
    assert plan is not None and plan.span_tokens(MOST) == 0
    controller.set_objective(Objective("off"))
    assert controller.plan() is None


def test_spans_need_no_lookups() -> None:
    controller = Controller(0, span_tokens=MOST)
    steady(controller, spans=(Span(1, 1),))
    plan = controller.plan()
    assert plan is not None and plan.span_tokens(MOST) > 0
    assert controller.snapshot()["lookups"] == []


def test_the_source_whose_k_is_chosen_may_be_a_lookup() -> None:
    """On vLLM's V2 model runner, without a head."""
    controller = Controller(MOST, drafter="lookup")
    assert controller.sources == ("lookup",)
    controller.observe(Step(Load(1, draft_tokens=2), 2, 0.01, 2, (1, 1), (1, 0)))
    state = controller.snapshot()
    assert state["available_sources"] == ["lookup"]
    assert state["totals"]["sources"]["lookup"] == {"drafted": 2, "accepted": 1}
    assert state["totals"]["sources"]["head"] == {"drafted": 0, "accepted": 0}
