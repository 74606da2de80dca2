"""The simulated engine counts its own tokens, seconds and drafts correctly."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from bench.simulate.engine import CATCH_UP, Request, SimulatedEngine
from bench.simulate.fixed import Fixed
from bench.simulate.traces import Clients, Poisson, Rounds, Trace, day
from drafters.control.policy import Step
from tests.drafters.control.engines import CODE, CPU, PROSE, engine


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("requests", [1, 24])
def test_a_fixed_k_makes_what_the_closed_form_says(k: int, requests: int) -> None:
    run = engine(Fixed(k, 7), [(math.inf, requests)], output=10**9)
    totals = run.run(steps=4000)
    truth = CPU.rate(requests, k, PROSE)
    assert totals.tokens / totals.busy_s == pytest.approx(truth, rel=0.03)
    assert totals.expected_tokens / totals.expected_s == pytest.approx(truth, rel=0.01)


def test_counts_of_a_step_are_those_of_its_drafts() -> None:
    run = engine(Fixed(3, 7), [(math.inf, 10)], survival=CODE, output=10**9)
    drafted, accepted = [0] * 7, [0] * 7
    for step in run.steps():
        assert step.load.draft_tokens == sum(step.drafted)
        assert step.tokens == step.load.requests + sum(step.accepted)
        drafted = [a + b for a, b in zip(drafted, step.drafted, strict=True)]
        accepted = [a + b for a, b in zip(accepted, step.accepted, strict=True)]
        if run.totals.steps == 2000:
            break
    assert drafted[3:] == [0] * 4
    shares = [hits / count for hits, count in zip(accepted[:3], drafted[:3], strict=True)]
    assert shares == pytest.approx(CODE[:3], abs=0.01)


def test_every_request_is_answered_to_its_last_token() -> None:
    trace = Rounds([(1, 3), (5, 12), (2, 4)], lambda: Request(PROSE, 700, 50))
    totals = SimulatedEngine(CPU, Fixed(5, 7), trace, random.Random(0)).run()
    assert totals.tokens == 19 * 50
    assert max(requests for _, requests, _ in totals.timeline) == 5


def test_expected_tokens_end_with_the_request() -> None:
    """The fault: drafts beyond a request's last token counted, the more the larger K was."""
    for output in (1, 2, 4):
        trace = Rounds([(4, 4000)], lambda length=output: Request(CODE, 700, length))
        totals = SimulatedEngine(CPU, Fixed(5, 7), trace, random.Random(0)).run()
        assert totals.tokens == 4000 * output
        assert totals.expected_tokens == pytest.approx(totals.tokens, rel=0.02)


def test_observations_come_in_order_and_as_late_as_said() -> None:
    class Recorder(Fixed):
        seen: int = 0

        def observe(self, step: Step) -> None:
            self.seen += 1

    for lag in (0, 1, 3):
        policy = Recorder(2, 7)
        engine(policy, [(math.inf, 2)], output=10**9, lag=lag).run(steps=50)
        assert policy.seen == 50 - lag


def test_catching_up_costs_what_was_skipped_up_to_a_limit() -> None:
    prompt, costs = 16, []
    for skipped in (10, 100, 3 * CATCH_UP):
        policy = Fixed(0, 7)
        run = engine(policy, [(math.inf, 1)], output=10**9, noise=0.0, pauses=0.0)
        run.run(steps=skipped)
        policy.k = 1
        before = run.totals.busy_s
        run.run(steps=skipped + 1)
        costs.append(run.totals.busy_s - before - CPU.steady(1, 0))
    first, second, third = costs
    assert second - first == pytest.approx(90 * CPU.drafter_token, rel=0.01)
    longer = CATCH_UP - (prompt + 10)
    assert third - first == pytest.approx(longer * CPU.drafter_token, rel=0.01)


def test_sequential_drafting_pays_for_every_pass() -> None:
    eagle = replace(CPU, parallel=False)
    assert eagle.draft(4, 3) == pytest.approx(3 * (eagle.drafter + 4 * eagle.drafter_token))
    assert CPU.draft(4, 3) == pytest.approx(CPU.drafter + 12 * CPU.drafter_token)
    assert CPU.draft(4, 0) == eagle.draft(4, 0) == 0.0


def test_clients_come_and_go_with_the_clock() -> None:
    trace: Trace = Clients([(1.0, 0), (2.0, 3), (3.0, 1)], lambda: Request(PROSE, 1, 1))
    assert [len(trace.due(now, 0)) for now in (0.5, 1.5, 2.5, 3.5)] == [0, 3, 1, 0]
    assert len(trace.due(1.5, 2)) == 1 and trace.due(2.5, 3) == []
    assert (trace.next_after(0.0), trace.next_after(1.5), trace.next_after(9.0)) == (1.0, 1.5, None)


def test_poisson_arrivals_follow_their_rate() -> None:
    new = lambda: Request(PROSE, 1, 1)  # noqa: E731
    trace = Poisson(day(1.0, 9.0, 100.0), 9.0, 100.0, new, random.Random(0))
    quarters = [len(trace.due(25.0 * (i + 1), 0)) for i in range(4)]
    expected = 25 * (5 - 4 * 2 / math.pi), 25 * (5 + 4 * 2 / math.pi)
    assert quarters[0] == pytest.approx(expected[0], rel=0.35)
    assert quarters[1] == pytest.approx(expected[1], rel=0.2)
    assert trace.next_after(100.0) is None
