"""What the drafter has not read, how long it has not drafted, and the averages of steps."""

from __future__ import annotations

import pytest

from drafters.control.policy import Load, Step
from drafters.control.traffic import Traffic
from drafters.control.tuning import Tuning

CATCH_UP_TOKENS = 64


def traffic() -> Traffic:
    return Traffic(CATCH_UP_TOKENS, Tuning())


def step(k: int, *, prompts: int = 0, context: int = 1000, drafts: int = 0) -> Step:
    """A step of two requests that makes four tokens in 10 ms."""
    load = Load(2, prefill_tokens=prompts, context_tokens=context, draft_tokens=drafts)
    return Step(load, k, 0.010, 4, (), ())


def test_what_a_plain_step_makes_and_reads_is_unread_until_the_drafter_runs() -> None:
    """Catches: a backlog that outlasts its reading, so that leaving K = 0 looks dear for ever."""
    found = traffic()
    found.update_backlog(step(0, prompts=20))
    found.update_backlog(step(0))
    assert found.unread_tokens_per_request == (20 + 4 + 4) / 2
    found.update_backlog(step(1))
    assert found.unread_tokens_per_request == 0.0


@pytest.mark.parametrize(("context", "most"), [(1000, CATCH_UP_TOKENS), (60, 60 / 2 + 1)])
def test_no_more_is_unread_than_is_kept_or_exists(context: int, most: float) -> None:
    found = traffic()
    for _ in range(100):
        found.update_backlog(step(0, context=context))
    assert found.unread_tokens_per_request == most


@pytest.mark.parametrize(
    "drafting",
    [step(1), step(0, drafts=1), step(0)._replace(looked_up=1)],
    ids=["makes drafts", "verifies drafts", "looks up"],
)
def test_steps_are_settled_some_time_after_the_last_drafts(drafting: Step) -> None:
    found = traffic()
    assert found.is_settled
    found.update_backlog(drafting)
    plain_steps = round(Tuning().settling_s / drafting.seconds)
    for _ in range(plain_steps - 1):
        found.update_backlog(step(0))
        assert not found.is_settled
    for _ in range(2):  # the sum of so many steps may be rounded down
        found.update_backlog(step(0))
    assert found.is_settled


@pytest.mark.parametrize("steps", [1, 100])
def test_averages_of_a_few_steps_are_those_of_these_steps(steps: int) -> None:
    """Catches: averages that begin at 0, half of the truth after 700 steps. K that hold a time per
    token are chosen by them."""
    found = traffic()
    for _ in range(steps):
        found.average(step(1, prompts=30))
    assert (found.prompt_tokens, found.output_tokens) == pytest.approx((30.0, 4.0))


def test_averages_are_those_of_steps() -> None:
    found = traffic()
    for _ in range(10_000):
        found.average(step(1, prompts=30))
    assert found.prompt_tokens == pytest.approx(30.0, rel=1e-3)
    assert found.output_tokens == pytest.approx(4.0, rel=1e-3)
