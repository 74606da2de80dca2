"""Timing of products: what a busy neighbour adds to most of them decides nothing."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("vllm", reason="vllm is not installed")

from drafters.vllm import cpu_matmul  # noqa: E402

ALONE = {torch.bfloat16: 0.0002, torch.float32: 0.0005}  # seconds of a product


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_neighbour_does_not_change_what_is_fastest(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two of three products wait some milliseconds for a core; hardly a round of eight does not."""
    clock, rng = SimpleNamespace(now=0.0), random.Random(seed)

    def layer(weight: Any) -> Any:
        def product(x: Any, *_: Any) -> None:
            waited = rng.uniform(0.002, 0.006) if rng.random() < 2 / 3 else 0.0
            clock.now += ALONE[x.dtype] + waited

        return SimpleNamespace(weight=weight, cpu_linear=product)

    monkeypatch.setattr(cpu_matmul, "_layer", layer)
    monkeypatch.setattr(cpu_matmul, "perf_counter", lambda: clock.now)
    found = cpu_matmul.race((1, 8), inputs=16, outputs=16, copies=8, rounds=3)
    expected = (ALONE[torch.bfloat16], ALONE[torch.float32])
    assert found == [pytest.approx(expected)] * 2
