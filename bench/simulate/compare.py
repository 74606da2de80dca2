"""Adaptive K against every fixed K, at the places of published tables and under moving loads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.engine.calibration import calibrate as measure_cells
from bench.simulate.engine import NOISE, Request, SimulatedEngine, SimulationTotals
from bench.simulate.fit import Place, cpu
from bench.simulate.fixed import Fixed
from bench.simulate.hardware import Hardware
from bench.simulate.traces import Clients, Poisson, Rounds, Trace, burst, day, ramp
from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.policy import Load, Policy

STEPS = 3000  # at each published place, the controller's first ones included
CALIBRATION_S, CALIBRATED_STEPS = 10.0, 16  # budget of a calibration, steps of one cell
CPU_K_MAX = 7
PROMPT = 24  # tokens
# Range of tokens, drawn uniformly. With equal lengths, 48 users who start together would end
# together, and the number of such waves in a burst of 4 s would change a tenth of a trace's tokens.
OUTPUT = (48, 144)
STAGES = (1, 4, 16, 48, 16, 4, 1)  # requests at once

MakeTrace = Callable[[Callable[[], Request], random.Random], Trace]


@dataclass(frozen=True, slots=True)
class Steady:
    """Adaptive K at one place, its start included. Rates are expected values, without noise."""

    place: Place
    best_k: int
    last_k: int
    over_best: float  # adaptive rate / best fixed rate
    over_none: float
    probe_share: float  # of decode seconds


@dataclass(frozen=True, slots=True)
class Moving:
    """Results of one moving load: tokens per second of the whole trace, or of requests' time."""

    name: str
    fixed: dict[int, float]
    adaptive: float
    oracle: float  # with the true best K at every step, at no cost: no policy of K can do better
    probe_share: float
    timeline: list[tuple[float, int, int]]

    @property
    def best_k(self) -> int:
        """The best single fixed K."""
        return max(self.fixed, key=self.fixed.__getitem__)

    @property
    def over_best(self) -> float:
        """Adaptive over the best single fixed K."""
        return self.adaptive / self.fixed[self.best_k]

    @property
    def oracle_over_best(self) -> float:
        """The oracle over the best single fixed K."""
        return self.oracle / self.fixed[self.best_k]


class Oracle(Fixed):
    """A policy that knows the true rates and chooses the best K in each step."""

    def __init__(self, hardware: Hardware, survival: tuple[float, ...], k_max: int) -> None:
        super().__init__(k_max, k_max)
        self._hardware, self._survival = hardware, list(survival)

    def choose(self, load: Load) -> int:
        """The K with the highest true rate at this batch."""
        return max(
            range(self._k_max + 1),
            key=lambda k: self._hardware.rate(max(1, load.requests), k, self._survival),
        )


def calibrate(
    hardware: Hardware, k_max: int, max_requests: int, rng: random.Random
) -> tuple[Cell, ...]:
    """Measure cells as start-up does, in noisy steps of the simulated hardware."""
    spent = 0.0

    def measure(requests: int, k: int) -> list[float]:
        nonlocal spent
        exact = hardware.steady(requests, k)
        steps = [exact * math.exp(rng.gauss(0.0, NOISE)) for _ in range(CALIBRATED_STEPS)]
        spent += sum(steps)
        return steps

    return measure_cells(
        measure, lambda: spent, k_max=k_max, max_requests=max_requests, budget_s=CALIBRATION_S
    )


def adaptive(
    hardware: Hardware,
    k_max: int,
    max_requests: int,
    rng: random.Random,
    make: Callable[[int], Controller] = Controller,
) -> Controller:
    """A controller that has been calibrated on `hardware`; `make` makes it for a largest K."""
    made = make(k_max)
    made.load_calibration(calibrate(hardware, k_max, max_requests, rng))
    return made


def endless(place: Place) -> Clients:
    """As many requests as the place's concurrency, which never end."""
    new = partial(Request, place.survival, 0, output=10**9)
    return Clients([(math.inf, place.concurrency)], new)


def of_random_lengths(survival: tuple[float, ...], seed: int) -> Callable[[], Request]:
    """What makes requests whose lengths follow from `seed`, whatever policy runs them."""
    lengths = random.Random(f"{seed} lengths")
    return lambda: Request(survival, PROMPT, lengths.randint(*OUTPUT))


def steady(place: Place, seed: int, steps: int = STEPS) -> Steady:
    """Run adaptive K with as many endless requests as the place's concurrency."""
    rng = random.Random(seed)
    policy = adaptive(place.hardware, place.k_max, 128, rng)
    engine = SimulatedEngine(place.hardware, policy, endless(place), rng, lag=1)
    totals = engine.run(steps)
    survival = list(place.survival)
    rates = [place.hardware.rate(place.concurrency, k, survival) for k in range(place.k_max + 1)]
    rate = totals.expected_tokens / totals.expected_s
    state = policy.snapshot()
    return Steady(
        place,
        rates.index(max(rates)),
        state["k"],
        rate / max(rates),
        rate / rates[0],
        state["probe_seconds"] / state["busy_seconds"],
    )


def traces() -> dict[str, tuple[MakeTrace, bool]]:
    """Moving loads by name: what makes the trace, and whether it is an open loop."""
    equal_time = [(10.0 * (i + 1), clients) for i, clients in enumerate(STAGES)]
    return {
        "1-48-1, 48 requests a stage": (
            lambda new, rng: Rounds([(clients, 48) for clients in STAGES], new), False,
        ),
        "1-48-1, 8 requests a client": (
            lambda new, rng: Rounds([(clients, 8 * clients) for clients in STAGES], new), False,
        ),
        "1-48-1, 10 s a stage": (lambda new, rng: Clients(equal_time, new), False),
        "burst of 48 for 4 s in 84": (
            lambda new, rng: Clients(burst(1, 48, 40.0, 4.0, 40.0), new), False,
        ),
        "ramp from 1 to 48 in 60 s": (
            lambda new, rng: Clients(ramp(1, 48, 60.0), new), False,
        ),
        "day of 120 s, Poisson": (
            lambda new, rng: Poisson(day(0.5, 20.0, 120.0), 20.0, 120.0, new, rng), True,
        ),
    }  # fmt: skip


def moving(name: str, seed: int, replicas: int = 1, place: Place | None = None) -> Moving:
    """Run every policy under the moving load `name`, on independent replicas of the CPU engine, or
    of the hardware and acceptance of `place`; each replica has a controller of its own."""
    hardware, survival = cpu() if place is None else (place.hardware, place.survival)
    k_max = CPU_K_MAX if place is None else place.k_max
    make, is_open = traces()[name]

    def value(policies: Callable[[random.Random], Policy]) -> tuple[float, SimulationTotals]:
        tokens = seconds = 0.0
        for replica in range(replicas):
            rng = random.Random(seed + replica)
            arrivals = random.Random(f"{seed + replica} arrivals")
            policy = policies(rng)
            trace = make(of_random_lengths(survival, seed + replica), arrivals)
            totals = SimulatedEngine(hardware, policy, trace, rng, lag=1).run()
            tokens += totals.tokens
            # In an open loop the tokens are the same with every K; the times of requests differ.
            seconds += totals.waited_s if is_open else totals.elapsed_s
        return tokens / seconds, totals

    def pinned(k: int) -> Callable[[random.Random], Policy]:
        return lambda rng: Fixed(k, k_max)

    fixed = {k: value(pinned(k))[0] for k in range(k_max + 1)}
    made: list[Controller] = []

    def adapting(rng: random.Random) -> Policy:
        made.append(adaptive(hardware, k_max, 48, rng))
        return made[-1]

    speed, totals = value(adapting)
    states = [controller.snapshot() for controller in made]
    probe_s = sum(state["probe_seconds"] for state in states)
    busy_s = sum(state["busy_seconds"] for state in states)
    return Moving(
        name,
        fixed,
        speed,
        value(lambda rng: Oracle(hardware, survival, k_max))[0],
        probe_s / busy_s,
        totals.timeline,
    )
