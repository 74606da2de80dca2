"""A simulated machine that others use too."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import mean, stdev

import pytest

from bench.simulate.engine import Request, SimulatedEngine
from bench.simulate.fixed import Fixed
from bench.simulate.hardware import BUSY_S, QUIET_S, WANDERING, SharedPace
from bench.simulate.traces import Clients
from tests.drafters.control.engines import CPU, PROSE


def test_the_pace_wanders_and_another_process_comes_every_two_minutes() -> None:
    quiet, busy = [], 0
    for seed in range(20):
        pace = SharedPace(seed)
        logarithms = [math.log(pace(float(second))) for second in range(1200)]
        # Beside the other process steps differ by more than the pace does in a second.
        jumps = [abs(after - before) > 0.3 for before, after in pairwise(logarithms)]
        busy += sum(jumps)
        quiet += [x for x, *near in zip(logarithms[1:], jumps, jumps[1:], strict=False)
                  if not any(near)]  # fmt: skip
    assert mean(quiet) == pytest.approx(0.0, abs=0.15)
    assert 0.5 * WANDERING < stdev(quiet) < 2.5 * WANDERING
    # Of pairs of the four factors that differ, all but 3 and 4 do so by more than 0.3: five in
    # eight.
    share = BUSY_S / (QUIET_S + BUSY_S)
    assert busy / (20 * 1200) == pytest.approx(share * 5 / 8, rel=0.25)


def test_the_pace_follows_from_the_time_alone() -> None:
    """Catches: a policy that makes fewer steps has another machine."""
    often, seldom = SharedPace(3), SharedPace(3)
    for step in range(1000):
        often(0.01 * step)
    assert often._log_paces == SharedPace(3)._log_paces + often._log_paces[1:]
    seldom(10.0)
    assert seldom._log_paces[:99] == often._log_paces[:99]


def test_plain_steps_after_drafts_are_slow_and_the_pace_is_that_of_the_time() -> None:
    class Turns(Fixed):
        def choose(self, load: object) -> int:
            self.chosen = getattr(self, "chosen", -1) + 1
            return 1 if self.chosen == 0 else 0

    trace = Clients([(math.inf, 1)], lambda: Request(PROSE, 0, output=10**9))
    engine = SimulatedEngine(
        CPU, Turns(1, 7), trace, random.Random(0), noise=0.0, pauses=0.0,
        pace=lambda second: 1.0 if second < 1.0 else 2.0, slow_after_drafts=0.4,
    )  # fmt: skip
    plain = CPU.steady(1, 0)
    steps = []
    for step in engine.steps():
        steps.append(step.seconds / plain)
        if engine.totals.elapsed_s > 1.0 + plain * 3:
            break
    # The first makes drafts, the second verifies them.
    assert steps[2:5] == pytest.approx([1.4, 1.2, 1.0 + 0.4 / 3])
    assert steps[-1] == pytest.approx(2.0, rel=0.02)
