"""Gains of forced spans: learnt from every span, drafted or not, against the price of verifying."""

from __future__ import annotations

import pytest

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
