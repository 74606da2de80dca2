"""Simulated hardware from steps that were measured: `aerie bench device` writes them down."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drafters.control.simulate.fit import FITTED_WORKLOAD, P_EAGLE, Place, curves
from drafters.control.simulate.hardware import Hardware
from drafters.control.simulate.minimise import minimise


class Cell(NamedTuple):
    """Steady steps of one batch at one K."""

    requests: int
    k: int
    seconds: float
    draft_seconds: float  # of `seconds`, in the drafter's pass; 0 at K = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """A machine, and by how much its fitted costs miss each measured step."""

    cells: tuple[Cell, ...]
    hardware: Hardware

    @property
    def errors(self) -> list[float]:
        """Relative and absolute, of each cell's step."""
        steady = self.hardware.steady
        return [abs(steady(c.requests, c.k) / c.seconds - 1.0) for c in self.cells]

    @property
    def places(self) -> list[Place]:
        """Every measured batch; acceptance is the one published for HumanEval."""
        survival = tuple(curves()[FITTED_WORKLOAD, P_EAGLE])
        k_max = min(len(survival), max(cell.k for cell in self.cells))
        batches = sorted({cell.requests for cell in self.cells})
        return [
            Place("measured", FITTED_WORKLOAD, requests, k_max, self.hardware, survival)
            for requests in batches
        ]


def measured(file: Path) -> Measured:
    """Costs fitted to the cells of K = 0 and of each K in a file of `aerie bench device`.

    ValueError where there are none, or too few to tell the costs of a step from each other.
    """
    cells = []
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        method = entry["key"][0].partition(":")[0] if entry.get("kind") == "cell" else ""
        if method in ("off", "k") and "step_ms" in entry:
            draft = entry.get("draft_ms", 0.0)
            cells.append(Cell(entry["key"][1], entry["k"], entry["step_ms"] / 1e3, draft / 1e3))
    batches, ks = {cell.requests for cell in cells}, {cell.k for cell in cells}
    if len(batches) < 2 or len(ks) < 3 or 0 not in ks:
        raise ValueError(f"{file}: wanted are steps of two batches at K = 0 and two other K")
    return Measured(tuple(cells), _fitted(cells))


def _fitted(cells: Sequence[Cell]) -> Hardware:
    def hardware(p: Sequence[float]) -> Hardware:
        return Hardware(p[0], p[1], 0.0, 0.0, p[2], p[3], p[4])

    def loss(p: Sequence[float]) -> float:
        device, total = hardware(p), 0.0
        for requests, k, seconds, draft_seconds in cells:
            total += math.log(device.steady(requests, k) / seconds) ** 2
            if draft_seconds:
                total += math.log(device.draft(requests, k) / draft_seconds) ** 2
        return total

    least = min(cell.seconds for cell in cells)
    most = max(cell.requests * (1 + cell.k) for cell in cells)
    return hardware(minimise(loss, [least, least / most, least / most, least / 4, least / most]))
