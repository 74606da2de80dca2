"""K where the drafter leaves out drafts that it doubts: what steps cost, and what they make."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from drafters.control.controller import Controller
from drafters.control.cost import Cell
from drafters.control.forecast import VERIFYING, Forecast
from drafters.control.objective import FIXED, LATENCY, OFF, THROUGHPUT
from drafters.control.policy import Load, Run, Step

K_MAX, BATCH = 8, 4
OFFERED = 0.75  # of the drafts at each position behind the first, if all before it were offered
RIGHT = 0.9  # of those that are offered; none that is left out would be


def seconds(made: float, verified: float) -> float:
    """Of a step whose drafter makes so many drafts, and whose target verifies so many."""
    drafts = (1.0 - VERIFYING) * made + VERIFYING * verified
    return 0.01 + 0.0005 * drafts + (0.002 if made else 0.0)


def offered(k: int, rng: random.Random) -> int:
    count = min(k, 1)
    while 0 < count < k and rng.random() < OFFERED:
        count += 1
    return count


def mean_offered(k: int) -> float:
    return sum(OFFERED**i for i in range(k))


def run(
    forecast: Forecast, k: int, steps: int, after: Callable[[], object] = bool
) -> tuple[float, float]:
    """Steps at `k`; the seconds they took and the tokens they made, on average."""
    rng, runs = random.Random(1), [0] * BATCH
    drafts = [offered(k, rng) for _ in range(BATCH)]
    took = made = 0.0
    for _ in range(steps):
        right = [0] * BATCH
        for i, count in enumerate(drafts):
            while right[i] < count and rng.random() < RIGHT:
                right[i] += 1
        verified = sum(drafts)
        tokens = sum(right) + BATCH
        step = Step(
            Load(BATCH, draft_tokens=verified, doubted_tokens=BATCH * k - verified),
            k,
            seconds(BATCH * k, verified) * rng.gauss(1.0, 0.05),
            tokens,
            tuple(sum(n > i for n in drafts) for i in range(K_MAX)),
            tuple(sum(n > i for n in right) for i in range(K_MAX)),
            tuple(Run(run, n + 1) for run, n in zip(runs, right, strict=True)),
            tuple(sum(i == n < k for n in drafts) for i in range(K_MAX)),
        )
        forecast.learn(step)
        after()
        took, made = took + step.seconds, made + tokens
        for i, count in enumerate(drafts):
            runs[i] = runs[i] + right[i] + 1 if right[i] == count == k else 0
        drafts = [offered(k, rng) for _ in range(BATCH)]
    return took / steps, made / steps


@pytest.fixture
def forecast() -> Forecast:
    """Calibrated with drafts all of which were offered."""
    known = Forecast(K_MAX, 256)
    known.costs.load(
        Cell(n, k, 0.0, seconds(n * k, n * k), 16.0) for n in (1, BATCH, 16) for k in (0, 1, 4, 8)
    )
    known.adapts = True
    return known


def test_costs_and_tokens_are_those_with_drafts_left_out(forecast: Forecast) -> None:
    took, made = run(forecast, K_MAX, 600)
    promise = forecast.promise(Load(BATCH))
    assert promise.seconds[K_MAX] == pytest.approx(took, rel=0.04)
    assert promise.tokens[K_MAX] == pytest.approx(made, rel=0.05)
    # And of each other K, at which a request is offered as many as there are, but K at most.
    for k in range(1, K_MAX):
        expected = seconds(BATCH * k, BATCH * mean_offered(k))
        assert promise.seconds[k] == pytest.approx(expected, rel=0.06), k
    # All of them would cost more than a tenth more.
    assert seconds(BATCH * K_MAX, BATCH * K_MAX) > 1.1 * took


def test_learning_from_several_steps_at_once_is_learning_from_each(forecast: Forecast) -> None:
    each = Forecast(K_MAX, 256)
    run(forecast, K_MAX, 301)
    run(each, K_MAX, 301, after=lambda: (each.acceptance, each.offers))
    one, other = forecast.acceptance, each.acceptance
    assert one.trials == pytest.approx(other.trials, rel=0.06)
    assert one.survival() == pytest.approx(other.survival(), rel=0.06)
    assert one.tokens() == pytest.approx(other.tokens(), rel=0.06)
    assert forecast.offers.survival() == pytest.approx(each.offers.survival(), rel=0.06)


def test_until_drafts_were_left_out_all_are_expected(forecast: Forecast) -> None:
    for k, found in enumerate(forecast.promise(Load(BATCH)).seconds):
        assert found == pytest.approx(seconds(BATCH * k, BATCH * k), rel=0.06), k


def test_a_request_that_may_have_few_is_offered_few(forecast: Forecast) -> None:
    run(forecast, K_MAX, 300)
    limited = Load(BATCH, reach=(BATCH, BATCH, *(1,) * (K_MAX - 2)))
    some, all_ = forecast.promise(limited), forecast.promise(Load(BATCH))
    assert some.seconds[:3] == all_.seconds[:3]
    assert some.seconds[K_MAX] < all_.seconds[K_MAX]


def test_a_pinned_k_is_that_k() -> None:
    policy = Controller(K_MAX, rng=random.Random(0))
    for objective, doubts in ((THROUGHPUT, True), (LATENCY, True), (FIXED, False), (OFF, False)):
        policy.steer(
            objective=objective,
            k=3 if objective == FIXED else None,
            tpot_s=0.1 if objective == LATENCY else None,
        )
        assert policy.doubts is doubts
