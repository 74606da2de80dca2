"""Timing of products: what a busy neighbour adds to most of them decides nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.vllm import cpu_matmul

ALONE = {torch.bfloat16: 0.0002, torch.float32: 0.0005}  # seconds of a product
FASTEST = (ALONE[torch.bfloat16], ALONE[torch.float32])
SIZES = {"inputs": 16, "outputs": 16, "copies": 8, "rounds": 3}


class Clock:
    """The time as `race` sees it, which only products take: `waits` says how long one that begins
    at a time has to wait for its core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: Callable[[float], float]) -> None:
        self.now = 0.0
        self.products = self.preemptions = 0

        def layer(weight: Any) -> Any:
            def product(x: Any, *_: Any) -> None:
                waited = waits(self.now)
                self.now += ALONE[x.dtype] + waited
                self.preemptions += waited > 0.0
                self.products += 1

            return SimpleNamespace(weight=weight, cpu_linear=product)

        monkeypatch.setattr(cpu_matmul, "_layer", layer)
        monkeypatch.setattr(cpu_matmul, "perf_counter", lambda: self.now)
        monkeypatch.setattr(cpu_matmul, "_preemptions", lambda: self.preemptions)


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_neighbour_does_not_change_what_is_fastest(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two of three products wait some milliseconds for a core; hardly a round of eight does not."""
    rng = random.Random(seed)
    clock = Clock(monkeypatch, lambda _: rng.uniform(0.002, 0.006) if rng.random() < 2 / 3 else 0.0)
    assert cpu_matmul.race((1, 8), **SIZES) == [pytest.approx(FASTEST)] * 2
    assert clock.products < 300  # 192 alone


def test_it_waits_for_products_that_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that start at once measure at the same moment: every product of the first
    rounds waits, and what then looks fastest is chance."""
    rng = random.Random(1)
    Clock(monkeypatch, lambda now: rng.uniform(0.002, 0.006) if now % 1.0 < 0.3 else 0.0)
    assert cpu_matmul.race((1, 8), **SIZES) == [pytest.approx(FASTEST)] * 2


def test_its_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda _: 0.004)
    found = cpu_matmul.race((1, 8), **SIZES)
    assert found == [pytest.approx([seconds + 0.004 for seconds in FASTEST])] * 2
    assert 2 * cpu_matmul.PATIENCE_S < clock.now < 2.5 * cpu_matmul.PATIENCE_S


def test_preemptions_are_seen() -> None:
    """This process and a busy one have one core together."""
    cores = os.sched_getaffinity(0)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for process in (0, busy.pid):
            os.sched_setaffinity(process, {min(cores)})
        before, deadline = cpu_matmul._preemptions(), time.monotonic() + 30
        while cpu_matmul._preemptions() < before + 3 and time.monotonic() < deadline:
            sum(range(100_000))
        assert cpu_matmul._preemptions() >= before + 3
    finally:
        os.sched_setaffinity(0, cores)
        busy.kill()
        busy.wait()
