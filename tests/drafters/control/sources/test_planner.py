"""Which sources a plan has, by what the engine has and what the objective allows."""

from __future__ import annotations

import pytest

from drafters.config import HEAD, LOOKUP
from drafters.control.acceptance import Acceptance
from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import Objective
from drafters.control.policy import Load, Span, Step
from drafters.control.predictions import KPrediction, Predictions
from drafters.control.read_costs import ReadCosts
from drafters.control.sources.planner import SourcePlanner
from drafters.control.tuning import Tuning

MOST = 5
PLAIN_S, DRAFT_S, PASS_S = 0.02, 0.0005, 0.002  # of a step, each draft token, the head's pass
READ_S = 1e-4  # in which the head reads a token


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


def head_at_two(requests: int) -> tuple[SourcePlanner, Predictions]:
    """A planner that has seen steps at K = 2 for long, of whose drafts 60% are accepted at the
    first position, 30% also at the second, 10% also at the third; and predictions of K = 2."""
    acceptance, read_costs = Acceptance(3, Tuning()), ReadCosts(Tuning())
    for _ in range(100):
        acceptance.observe(1000, (1000,) * 3, (600, 300, 100))
    read_costs.drafter.observe(100, 100 * READ_S)
    planner = SourcePlanner(3, MOST, 0, acceptance, read_costs, Tuning())
    planner.load_calibration([Cell(requests, 0, PLAIN_S, 5)])
    planner.use((HEAD, LOOKUP))
    load = Load(requests, draft_tokens=2 * requests)
    seconds = PLAIN_S + 2 * requests * DRAFT_S + PASS_S
    for _ in range(300):
        planner.observe_seconds(
            Step(load, 2, seconds, 2 * requests, (), (), draft_seconds=PASS_S), 0.0, settled=True
        )
    prediction = KPrediction(2, seconds, 0.01, 2.0 * requests, 1.0, 1.0, 1.0, 1.0)
    return planner, Predictions(load, 0, {2: prediction})


@pytest.mark.parametrize("requests", [1, 4])
def test_the_heads_pass_is_priced_apart_from_what_it_verifies(requests: int) -> None:
    """Catches: verification priced twice, or a pass that costs each of its requests all of it."""
    planner, predictions = head_at_two(requests)
    found = planner.plan(predictions.load, 2, predictions)
    assert found is not None
    rate = 2 * requests / predictions.by_k[2].seconds
    whole_pass = found.pass_price + (requests - 1) * found.further_price
    assert whole_pass == pytest.approx(rate * PASS_S, rel=0.1)
    assert found.read_price == pytest.approx(rate * READ_S, rel=0.1)
    assert found.head_k == 2
    assert found.head_gain == pytest.approx(0.9 - 2 * DRAFT_S * rate, rel=0.1)
    assert found.alone_gain == pytest.approx(found.head_gain)


def test_alone_the_head_is_worth_its_pass_at_the_k_that_was_chosen() -> None:
    """However few of its drafts are accepted: K was chosen with that in view."""
    planner, predictions = head_at_two(1)
    for _ in range(100):
        planner._head_acceptance.observe(1000, (1000,) * 3, (10, 0, 0))
    found = planner.plan(predictions.load, 2, predictions)
    assert found is not None and found.head_gain < found.alone_gain
    assert found.alone_gain == pytest.approx(found.pass_price)


def test_a_plan_holds_while_its_predictions_and_its_k_do() -> None:
    """Catches: a plan made anew in each step, which takes as long as a choice of K; an old one."""
    controller = Controller(3, lookup_tokens=MOST)
    controller.load_calibration(Cell(1, k, 0.010 + 0.0002 * k, 100) for k in range(4))
    plans = []
    for _ in range(60):
        k = controller.choose(Load(1))
        plans.append((k, controller.plan()))
        controller.observe(Step(Load(1, draft_tokens=k), k, 0.01 + 0.0002 * k, 1, (), ()))
    made = [plan for _, plan in plans if plan is not None]
    distinct = len({id(plan) for plan in made})
    assert 2 <= distinct <= len(made) / 4
