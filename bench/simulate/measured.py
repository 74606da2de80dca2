"""Fit simulated hardware to steps that `aerie bench device` or a sweep measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.simulate.fit import FITTED_WORKLOAD, P_EAGLE, Place, curves
from bench.simulate.hardware import Hardware
from bench.simulate.minimise import minimise


class SteadySteps(NamedTuple):
    """The mean steady step of one batch at one K."""

    requests: int
    k: int
    seconds: float
    draft_seconds: float  # of `seconds`, in the drafter's pass; 0 at K = 0 or if unknown
    steps: tuple[tuple[int, float], ...] = ()  # (K, share) if K varied, in a cell of a sweep


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A measured machine: its steps, and the costs that were fitted to them."""

    cells: tuple[SteadySteps, ...]
    hardware: Hardware
    survival: tuple[float, ...]  # share of drafts accepted up to each position

    @property
    def errors(self) -> list[float]:
        """The relative error of the fit for each cell's step, without sign."""
        return [abs(_seconds(self.hardware, cell) / cell.seconds - 1.0) for cell in self.cells]

    @property
    def places(self) -> list[Place]:
        """A place of comparison for every measured batch."""
        k_max = min(len(self.survival), max(cell.k for cell in self.cells))
        batches = sorted({cell.requests for cell in self.cells})
        return [
            Place("measured", FITTED_WORKLOAD, requests, k_max, self.hardware, self.survival)
            for requests in batches
        ]


def measured(file: Path, survival: Sequence[float] = ()) -> MeasuredMachine:
    """Fit costs to the cells at each K in a file of `aerie bench device`, or to those of this
    gateway in one of `aerie bench sweep`, whose steps read prompts too, so that costs are a little
    too high.

    `survival` is the share of drafts accepted up to each position; by default that published for
    HumanEval. Raises ValueError if there are too few cells to separate the costs of a step.
    """
    cells = []
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        method = entry["key"][0].partition(":")[0] if entry.get("kind") == "cell" else ""
        if method in ("off", "k") and "step_ms" in entry:
            draft = entry.get("draft_ms", 0.0)
            cells.append(
                SteadySteps(entry["key"][1], entry["k"], entry["step_ms"] / 1e3, draft / 1e3)
            )
        elif method in ("off", "k", "adaptive") and entry.get("steps"):
            cells.append(_of_sweep(entry))
    batches = {cell.requests for cell in cells}
    ks = {k for cell in cells for k, _ in cell.steps or ((cell.k, 1.0),)}
    if len(batches) < 2 or len(ks) < 3 or 0 not in ks:
        raise ValueError(f"{file}: needs steps of two batches, at K = 0 and at two other K")
    curve = tuple(survival) or tuple(curves()[FITTED_WORKLOAD, P_EAGLE])
    return MeasuredMachine(tuple(cells), _fitted(cells), curve)


def _of_sweep(entry: dict[str, Any]) -> SteadySteps:
    steps = {int(k): count for k, count in entry["steps"].items()}
    total = sum(steps.values())
    shares = tuple((k, count / total) for k, count in steps.items())
    return SteadySteps(entry["key"][1], max(steps), entry["decode_seconds"] / total, 0.0, shares)


def _seconds(hardware: Hardware, cell: SteadySteps) -> float:
    steps = cell.steps or ((cell.k, 1.0),)
    return sum(share * hardware.steady(cell.requests, k) for k, share in steps)


def _fitted(cells: Sequence[SteadySteps]) -> Hardware:
    def hardware(p: Sequence[float]) -> Hardware:
        return Hardware(p[0], p[1], 0.0, 0.0, p[2], p[3], p[4])

    def loss(p: Sequence[float]) -> float:
        device, total = hardware(p), 0.0
        for cell in cells:
            total += math.log(_seconds(device, cell) / cell.seconds) ** 2
            if cell.draft_seconds:
                drafting = device.draft(cell.requests, cell.k)
                total += math.log(drafting / cell.draft_seconds) ** 2
        return total

    least = min(cell.seconds for cell in cells)
    most = max(cell.requests * (1 + cell.k) for cell in cells)
    return hardware(minimise(loss, [least, least / most, least / most, least / 4, least / most]))
