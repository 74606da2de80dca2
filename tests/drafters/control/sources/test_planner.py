"""Which sources a plan has, by what the engine has and what the objective allows."""

from __future__ import annotations

from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import Objective
from drafters.control.policy import Load, Span, Step

MOST = 5


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
