"""Probes: the budget that bounds them, and backing off."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.control.policy import Load
from drafters.control.probing import (
    ADVANCE,
    DEEPER,
    FIRST_S,
    JITTER,
    LAST_S,
    LONGEST_S,
    OF_STAY,
    PLAIN,
    SHARE,
    Probe,
    Probing,
)


def probe(steps: int = 2, rate: float = 1000.0) -> Probe:
    return Probe(PLAIN, 0, Load(4), rate, 500.0, to_choose=0, to_observe=steps + 2)


def test_what_was_not_earned_is_not_spent() -> None:
    probing = Probing(random.Random(0))
    assert not probing.begin(probe(rate=1e5), 0.05)  # 5,000 tokens
    probing.earn(100.0, 9_999_999)
    assert not probing.begin(probe(rate=1e5), 0.05)  # the most that is saved up is 4,096
    assert probing.begin(probe(rate=1e5), 0.04)


def test_a_long_stall_is_never_worth_it() -> None:
    probing = Probing(random.Random(0))
    probing.earn(1000.0, 0)
    assert not probing.begin(probe(rate=1.0), 1.01 * LONGEST_S)
    assert probing.begin(probe(rate=1.0), 0.99 * LONGEST_S)


def test_a_short_stay_at_one_k_pays_for_no_dear_probe() -> None:
    probing = Probing(random.Random(0))
    probing.earn(1000.0, 999_999)
    probing.renew()
    probing.earn(2.0, 999)
    assert not probing.begin(probe(), 2.1 * OF_STAY)
    assert probing.begin(probe(), 1.9 * OF_STAY)


@given(st.lists(st.tuples(st.floats(0.0, 0.1), st.floats(0.0, 3.0)), max_size=60))
@settings(max_examples=60)
def test_the_bound_holds_whatever_probes_really_cost(trials: list[tuple[float, float]]) -> None:
    """Each trial: a predicted loss, and by how many times the prediction was wrong."""
    probing, made, rate = Probing(random.Random(0)), 0, 1000.0
    for predicted, wrong in trials:
        probing.earn(0.1, 100)
        made += 100
        before = probing.lost_tokens
        if probing.begin(probe(1, rate), predicted):
            for _ in range(3):
                ended = probing.charge(0, predicted * wrong / 3, 0)
            assert ended
            excess = max(0.0, (wrong - 1.0) * predicted * rate)
            assert before + predicted * rate <= ADVANCE + SHARE * made + 1e-6
            assert probing.lost_tokens <= ADVANCE + SHARE * made + excess + 1e-6


def test_only_its_own_steps_are_charged() -> None:
    """Asynchronous: a step of the K before is observed after the probe has begun."""
    probing = Probing(random.Random(0))
    assert probing.begin(probe(2), 0.0)
    assert not probing.charge(5, 9.0, 4)  # of K = 5, however slow
    assert not probing.charge(0, 0.010, 4)
    assert not probing.charge(0, 0.010, 4)
    assert probing.charge(5, 0.010, 4)  # verifies nothing: the probe's doing as well
    assert probing.lost_seconds == pytest.approx(3 * (0.010 - 0.004))
    assert probing.active is None


def test_a_probe_that_gains_is_no_loan() -> None:
    probing = Probing(random.Random(0))
    assert probing.begin(probe(1), 0.0)
    while not probing.charge(0, 0.001, 100):
        pass
    assert probing.lost_seconds == probing.lost_tokens == 0.0


def test_in_vain_it_backs_off_and_a_change_brings_it_back() -> None:
    probing = Probing(random.Random(0))
    for _ in range(10):
        probing.settle(probe(), promised=510.0)
    assert probing.back_off[PLAIN] == LAST_S
    assert probing.back_off[DEEPER] == FIRST_S
    probing.earn((1.0 - JITTER) * LAST_S - 0.01, 0)
    assert probing.is_due(DEEPER) and not probing.is_due(PLAIN)
    probing.renew()
    probing.earn(FIRST_S, 0)
    assert probing.is_due(PLAIN)


def test_a_surprise_brings_it_back() -> None:
    """Old evidence outweighs one probe, so what moves the estimate is worth another soon."""
    probing = Probing(random.Random(0))
    for _ in range(10):
        probing.settle(probe(), promised=500.0)
    probing.settle(probe(), promised=550.0)
    assert probing.back_off[PLAIN] == FIRST_S


def test_nothing_is_due_while_one_is_under_way() -> None:
    probing = Probing(random.Random(0))
    probing.earn(2.0 * FIRST_S, 100)
    assert probing.is_due(DEEPER)
    assert probing.begin(probe(), 0.0)
    assert not probing.is_due(DEEPER)
