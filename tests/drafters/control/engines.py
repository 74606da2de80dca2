"""Simulated engines with known costs, for tests of the controller."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from app.engine.calibration import calibrate
from bench.simulate.curve import geometric
from bench.simulate.engine import Request, SimulatedEngine
from bench.simulate.hardware import Hardware
from bench.simulate.traces import Clients, Shape
from drafters.control.cost_table import Cell
from drafters.control.policy import Policy

# Small batches gain from drafts, large ones lose. Of 0..7 drafts 5, 2, 0, 0 are best for prose at
# 1, 6, 20 and 48 requests, and 7, 5, 2, 0 for code.
CPU = Hardware(
    base=4e-3, request=1e-5, experts=0.0, touched=0.0, token=1e-4, drafter=1.5e-3,
    drafter_token=4e-5,
)  # fmt: skip
# SmolLM2-135M on two cores of a Xeon with AMX, about, and what its head's drafts of HumanEval are
# worth: of 0..5 drafts 4, 2, 1, 0 are best at 1, 4, 16 and 64 requests.
SMOLLM2 = Hardware(
    base=23e-3, request=6e-4, experts=0.0, touched=0.0, token=6.5e-4, drafter=1.5e-3,
    drafter_token=5e-5,
)  # fmt: skip
HUMANEVAL = (0.607, 0.286, 0.134, 0.049, 0.027)
CODE, PROSE = geometric(0.8, 0.8), geometric(0.55, 0.55)


@dataclass(frozen=True, slots=True)
class TwoCores(Hardware):
    """Steps of a target of 22 M parameters on two cores: no sum of the controller's terms."""

    TARGET = ((1, 11), (4, 12.5), (8, 15), (16, 19), (32, 31), (64, 47), (128, 88), (256, 190),
              (768, 440), (4096, 2300))  # fmt: skip  # tokens, ms

    def target(self, requests: int, tokens: int, context: int = 0) -> float:
        if tokens == 0:
            return 0.0
        place = bisect_left(self.TARGET, (tokens,), 1, len(self.TARGET) - 1)
        (few, fast), (many, slow) = self.TARGET[place - 1 : place + 1]
        return 1e-3 * (fast + (slow - fast) * (tokens - few) / (many - few))

    def draft(self, requests: int, k: int, unseen: int = 0) -> float:
        return 1e-3 * (2.5 + 0.3 * requests + 0.12 * requests * k + 0.06 * unseen) if k else 0.0


TWO_CORES = TwoCores(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
MIXED = (0.66, 0.47, 0.35, 0.26, 0.2, 0.15, 0.11, 0.085, 0.065, 0.05, 0.04)


def calibration(
    hardware: Hardware, k_max: int, max_requests: int = 64, steps: int = 5
) -> tuple[Cell, ...]:
    """Without noise. Each cell takes `steps` steps, five of which are measured."""
    spent = [0.0]

    def measure(requests: int, k: int) -> Sequence[float]:
        spent[0] += steps * hardware.steady(requests, k)
        return [hardware.steady(requests, k)] * 5

    return calibrate(
        measure, lambda: spent[0], k_max=k_max, max_requests=max_requests, budget_s=10.0
    )


def engine(
    policy: Policy,
    shape: Shape,
    *,
    hardware: Hardware = CPU,
    survival: Sequence[float] = PROSE,
    prompt: int = 16,
    output: int = 100,
    pauses: float = 0.0,
    noise: float = 0.03,
    lag: int = 1,
    together: bool = False,
    limits: Sequence[int | None] = (None,),
    seed: int = 0,
) -> SimulatedEngine:
    """Clients that ask for `output` tokens each, with at most `limits` drafts in turn."""
    turns = cycle(limits)
    return SimulatedEngine(
        hardware, policy,
        Clients(shape, lambda: Request(survival, prompt, output, limit=next(turns))),
        random.Random(seed), noise=noise, pauses=pauses, lag=lag,
        together=together,
    )  # fmt: skip


def best(hardware: Hardware, requests: int, survival: Sequence[float], k_max: int) -> int:
    """The K with the highest true rate."""
    return max(range(k_max + 1), key=lambda k: hardware.rate(requests, k, list(survival)))
