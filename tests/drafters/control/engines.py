"""Simulated engines with known costs, for tests of the controller."""

from __future__ import annotations

import random
from collections.abc import Sequence

from drafters.control.calibration import Calibration
from drafters.control.policy import Policy
from drafters.control.simulate.curve import geometric
from drafters.control.simulate.engine import Engine, Request
from drafters.control.simulate.hardware import Hardware
from drafters.control.simulate.traces import Clients, Shape

# Small batches gain from drafts, large ones lose. Of 0..7 drafts 5, 2, 0, 0 are best for prose at
# 1, 6, 20 and 48 requests, and 7, 5, 2, 0 for code.
CPU = Hardware(
    base=4e-3, request=1e-5, experts=0.0, touched=0.0, token=1e-4, drafter=1.5e-3,
    drafter_token=4e-5,
)  # fmt: skip
CODE, PROSE = geometric(0.8, 0.8), geometric(0.55, 0.55)


def calibration(hardware: Hardware, k_max: int, max_requests: int = 64) -> Calibration:
    """A short one, without noise."""
    spent = [0.0]

    def measure(requests: int, k: int) -> Sequence[float]:
        spent[0] += 5 * hardware.steady(requests, k)
        return [hardware.steady(requests, k)] * 5

    return Calibration.run(
        measure, lambda: spent[0], k_max=k_max, max_requests=max_requests, fingerprint={}
    )


def engine(
    policy: Policy,
    shape: Shape,
    *,
    hardware: Hardware = CPU,
    survival: Sequence[float] = PROSE,
    output: int = 100,
    pauses: float = 0.0,
    noise: float = 0.03,
    asynchronous: bool = True,
    seed: int = 0,
) -> Engine:
    """Clients that ask for `output` tokens each."""
    return Engine(
        hardware, policy, Clients(shape, lambda: Request(survival, 16, output)),
        random.Random(seed), noise=noise, pauses=pauses, asynchronous=asynchronous,
    )  # fmt: skip


def best(hardware: Hardware, requests: int, survival: Sequence[float], k_max: int) -> int:
    """The K with the highest true rate."""
    return max(range(k_max + 1), key=lambda k: hardware.rate(requests, k, list(survival)))
