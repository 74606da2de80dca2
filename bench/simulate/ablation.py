"""What each mechanism of the controller is worth: tokens without it over tokens with all of them.

Each is switched off in turn, under the same loads and with the same random numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, stdev
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.simulate.compare import (
    CPU_K_MAX,
    STEPS,
    MakeTrace,
    adaptive,
    endless,
    of_random_lengths,
    traces,
)
from bench.simulate.engine import SimulatedEngine
from bench.simulate.fit import FITTED_WORKLOAD, Place
from bench.simulate.hardware import SLOW_AFTER_DRAFTS, Hardware, SharedPace
from bench.simulate.traces import Trace
from drafters.control import cost_table
from drafters.control.controller import Controller
from drafters.control.tuning import Tuning
from drafters.small_samples import student_t

NOISE = 0.08  # of a step on a shared machine: standard deviation of its logarithm (bench/LOG.md)
MAX_REQUESTS = 48
NEVER = 10**9


class WithoutProbes(Controller):
    """No other K is tried."""

    def _begin_probe(self, predictions: Any) -> None:
        pass


class WithoutWaiting(Controller):
    """K = 0 is left as soon as another K looks better."""

    def _pays_to_leave_zero(self, predictions: Any) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A part of the controller, and how it is switched off."""

    name: str
    tuning: Tuning | None = None  # None: as shipped
    controller: type[Controller] = Controller
    any_order: bool = False  # costs may fall with K

    def off(self) -> AbstractContextManager[Any]:
        """What is patched while it is off."""
        if not self.any_order:
            return nullcontext()
        return patch.object(cost_table, "monotone", lambda values, weights: list(values))


def _tuned(name: str, **changes: Any) -> Mechanism:
    return Mechanism(name, tuning=replace(Tuning(), **changes))


ALL = Mechanism("none")
MECHANISMS = (
    _tuned("pace that all K share", pace_memory_steps=NEVER),
    Mechanism("costs that never fall with K", any_order=True),
    _tuned("doubt that grows with a cost's age", cost_noise=0.0),
    _tuned("noise learnt from steps", noise_memory_steps=NEVER),
    _tuned("bound on outliers", outlier_deviations=math.inf),
    _tuned("plain steps count once settled", settling_s=0.0),
    Mechanism("wait before K = 0 is left", controller=WithoutWaiting),
    Mechanism("probes", controller=WithoutProbes),
    _tuned("optimism of probes", optimism=0.0),
    _tuned("limit of what probes lose", probe_share=math.inf),
    _tuned("a probe of K = 0 each minute", plain_probe_s=math.inf),
    _tuned("hysteresis", hysteresis=0.0),
    _tuned("predictions that hold for 16 steps", prediction_steps=1, unsettled_prediction_steps=1),
    _tuned("new predictions while the batch is new", unsettled_prediction_steps=16),
)


@dataclass(frozen=True, slots=True)
class AblationRun:
    """One load under the controller."""

    tokens_per_second: float
    # How far the speed-up gauge is off, of a steady load: |log(gauge / true speed-up)|.
    gauge_error: float | None


@dataclass(frozen=True, slots=True)
class MechanismWorth:
    """A mechanism switched off, over all loads and seeds."""

    name: str
    steady: float  # tokens without it over tokens with all, the geometric mean
    steady_interval: float  # half of the 95% interval
    moving: float
    moving_interval: float
    shared: float  # steady and moving loads on a machine that others use too
    shared_interval: float
    # How far the gauge is off without it, the mean over the steady loads.
    gauge_error: float
    shared_gauge_error: float


def ablation(
    places: Sequence[Place], seeds: Sequence[int], steps: int = STEPS
) -> Iterator[MechanismWorth]:
    """Yield all mechanisms together, then without each of them. `places` are the steady loads, each
    of so many `steps`; the hardware of the last one is used under the moving loads."""
    base = _runs(ALL, places, seeds, steps)
    for mechanism in (ALL, *MECHANISMS):
        runs = base if mechanism is ALL else _runs(mechanism, places, seeds, steps)
        yield MechanismWorth(
            mechanism.name,
            *_ratio(runs.steady, base.steady),
            *_ratio(runs.moving, base.moving),
            *_ratio(runs.shared, base.shared),
            _gauge_error(runs.steady),
            _gauge_error(runs.shared),
        )


def _gauge_error(runs: Sequence[AblationRun]) -> float:
    """The mean over the steady loads among the runs."""
    return mean(run.gauge_error for run in runs if run.gauge_error is not None)


class AblationRuns(NamedTuple):
    """The runs of one controller, by kind of load."""

    steady: list[AblationRun]
    moving: list[AblationRun]
    shared: list[AblationRun]


def _runs(
    mechanism: Mechanism, places: Sequence[Place], seeds: Sequence[int], steps: int
) -> AblationRuns:
    # In an open loop the tokens per second are the clients', whatever the controller does.
    closed = [make for make, is_open in traces().values() if not is_open]
    steady, moving = partial(_steady, mechanism), partial(_moving, mechanism, places[-1])
    with mechanism.off():
        return AblationRuns(
            [steady(place, seed, steps) for place in places for seed in seeds],
            [moving(make, seed) for make in closed for seed in seeds],
            [
                *(steady(place, seed, steps, shared=True) for place in places for seed in seeds),
                *(moving(make, seed, shared=True) for make in closed for seed in seeds),
            ],
        )


def _controller(mechanism: Mechanism, place: Place, rng: random.Random) -> Controller:
    make = partial(mechanism.controller, tuning=mechanism.tuning)
    return adaptive(place.hardware, place.k_max, MAX_REQUESTS, rng, make)


def _engine(
    place: Place, policy: Controller, trace: Trace, rng: random.Random, seed: int, shared: bool
) -> SimulatedEngine:
    """An engine of two processes on a machine of its own, or of one on a shared machine: the
    default on a CPU."""
    if not shared:
        return SimulatedEngine(place.hardware, policy, trace, rng, noise=NOISE, lag=1)
    return SimulatedEngine(
        place.hardware, policy, trace, rng, noise=NOISE, together=True,
        pace=SharedPace(seed), slow_after_drafts=SLOW_AFTER_DRAFTS,
    )  # fmt: skip


def _steady(
    mechanism: Mechanism, place: Place, seed: int, steps: int, shared: bool = False
) -> AblationRun:
    rng = random.Random(seed)
    policy = _controller(mechanism, place, rng)
    totals = _engine(place, policy, endless(place), rng, seed, shared).run(steps)
    sums = policy.snapshot()["totals"]
    gauge = sums["plain_seconds"] / sums["decode_seconds"]
    rate = totals.expected_tokens / totals.expected_s
    truth = rate / place.hardware.rate(place.concurrency, 0, list(place.survival))
    return AblationRun(rate, abs(math.log(gauge / truth)))


def _moving(
    mechanism: Mechanism, place: Place, make: MakeTrace, seed: int, shared: bool = False
) -> AblationRun:
    rng, arrivals = random.Random(seed), random.Random(f"{seed} arrivals")
    policy = _controller(mechanism, place, rng)
    trace = make(of_random_lengths(place.survival, seed), arrivals)
    totals = _engine(place, policy, trace, rng, seed, shared).run()
    # Without noise and pace: the trace is over when its tokens are made, whatever the pace is then.
    return AblationRun(totals.expected_tokens / totals.expected_s, None)


def _ratio(runs: Sequence[AblationRun], base: Sequence[AblationRun]) -> tuple[float, float]:
    """Geometric mean of the ratios of paired runs, and half of its 95% interval."""
    logarithms = [
        math.log(run.tokens_per_second / other.tokens_per_second)
        for run, other in zip(runs, base, strict=True)
    ]
    error = stdev(logarithms) / math.sqrt(len(logarithms))
    return math.exp(mean(logarithms)), error * student_t(0.975, len(logarithms) - 1)


def on_cpu(hardware: Hardware, survival: Sequence[float]) -> list[Place]:
    """Steady loads of 1, 4, 16 and 32 users, as on a CPU, with as many drafts as `survival` has."""
    k_max = min(CPU_K_MAX, len(survival))
    return [
        Place("cpu", FITTED_WORKLOAD, users, k_max, hardware, tuple(survival))
        for users in (1, 4, 16, 32)
    ]
