from __future__ import annotations

import pytest

from drafters.learning.load_signal import Activity
from drafters.train.learner.pacing import SETTLED_S, TICK_S, Pacing


def ticks(pacing: Pacing, activity: Activity, seconds: float, start: float) -> list[bool]:
    looks = range(round(seconds / TICK_S))
    return [pacing.may_run(activity, start + number * TICK_S) for number in looks]


def test_training_begins_once_the_gateway_has_been_idle_for_a_while():
    pacing = Pacing()
    allowed = ticks(pacing, Activity.IDLE, seconds=2 * SETTLED_S, start=100.0)
    assert allowed == [False] * round(SETTLED_S / TICK_S) + [True] * round(SETTLED_S / TICK_S)


def test_a_request_stops_it_at_the_next_look_and_idleness_counts_anew():
    pacing = Pacing()
    ticks(pacing, Activity.IDLE, seconds=1.0, start=0.0)
    assert not pacing.may_run(Activity.BUSY, 1.0)
    assert not pacing.may_run(Activity.IDLE, 1.05)
    assert not pacing.may_run(Activity.IDLE, 1.05 + SETTLED_S - TICK_S)
    assert pacing.may_run(Activity.IDLE, 1.05 + SETTLED_S)


def test_without_a_share_nothing_runs_under_load():
    assert not any(ticks(Pacing(), Activity.BUSY, seconds=60.0, start=0.0))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_share_of_the_time_under_load_is_kept(share: float):
    allowed = ticks(Pacing(share=share), Activity.BUSY, seconds=100.0, start=0.0)
    assert sum(allowed) / len(allowed) == pytest.approx(share, abs=0.002)


def test_an_engine_that_starts_is_left_alone_whatever_the_share():
    """Catches: idleness from before the start that counts on behind it."""
    pacing = Pacing(share=0.5)
    ticks(pacing, Activity.IDLE, seconds=2 * SETTLED_S, start=0.0)
    assert not pacing.may_have_process(Activity.STARTING)
    assert pacing.may_have_process(Activity.BUSY) and pacing.may_have_process(Activity.IDLE)
    assert not pacing.may_run(Activity.IDLE, 2 * SETTLED_S + TICK_S)
    assert Pacing("always").may_have_process(Activity.STARTING)


def test_time_that_nobody_looked_at_earns_nothing():
    """After a pause of the whole machine the learner has no claim to an hour of its own."""
    pacing = Pacing(share=0.5)
    pacing.may_run(Activity.BUSY, 0.0)
    assert sum(ticks(pacing, Activity.BUSY, seconds=10.0, start=3600.0)) <= 101


def test_always_means_under_load_too():
    assert all(ticks(Pacing("always"), Activity.BUSY, seconds=1.0, start=0.0))


def test_a_share_above_one_is_refused():
    with pytest.raises(ValueError, match="share"):
        Pacing(share=1.5)
