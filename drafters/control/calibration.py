"""What start-up measures before the first request, and the file that saves measuring it again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

BUDGET_S = 10.0
FORMAT = 1
_MOST = 16  # steps that a calibrated cell counts for: real load soon knows better

# (requests, K) -> seconds of steady steps at that batch and K, at least one.
Measure = Callable[[int, int], Sequence[float]]


@dataclass(slots=True)
class Cell:
    """Measured steps of one batch at one K."""

    requests: float
    k: int
    context: float  # tokens in the KV cache, over all requests
    seconds: float  # of a step
    weight: float = 1.0  # steps that it stands for


class CalibrationError(ValueError):
    """A calibration cannot be used here; the message says why."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured cells, and what they were measured on."""

    fingerprint: Mapping[str, str]  # hardware, model, head, versions: whatever changes the cost
    cells: tuple[Cell, ...]

    @classmethod
    def run(
        cls,
        measure: Measure,
        clock: Callable[[], float],
        *,
        k_max: int,
        max_requests: int,
        fingerprint: Mapping[str, str],
        budget_s: float = BUDGET_S,
    ) -> Self:
        """Measure cell by cell, the most telling first, until all are done or time is up.

        A cell is left out if by the time that others took it would not fit into what is left of
        the budget, or with drafts would take a quarter of all of it: a machine that is busy
        with so many tokens for so long will not draft them. The first cell never is.
        """
        start = clock()
        cells: list[Cell] = []
        took: list[tuple[int, float]] = []  # tokens of a step, seconds of the cell
        for requests, k in plan(k_max, max_requests):
            began, tokens = clock(), requests * (1 + k)
            left = start + budget_s - began
            if k == 0:
                likely = max((seconds for _, seconds in took), default=0.0)
            else:  # no longer than one with more tokens, and than in proportion to one with fewer
                likely = min(seconds * max(1.0, tokens / n) for n, seconds in took)
                left = min(left, budget_s / 4.0)
            if cells and likely > left:
                continue
            seconds = measure(requests, k)
            cells.append(Cell(requests, k, 0.0, median(seconds), min(_MOST, len(seconds))))
            took.append((tokens, clock() - began))
        return cls(fingerprint, tuple(cells))

    def save(self, path: Path) -> None:
        """Write JSON."""
        cells = [[c.requests, c.k, c.context, c.seconds, c.weight] for c in self.cells]
        document = {"format": FORMAT, "fingerprint": dict(self.fingerprint), "cells": cells}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")

    @classmethod
    def read(cls, path: Path, fingerprint: Mapping[str, str]) -> Self:
        """A saved calibration of the same things, or CalibrationError."""
        try:
            document: dict[str, Any] = json.loads(path.read_text("utf-8"))
            if document["format"] != FORMAT:
                raise CalibrationError(f"{path}: format {document['format']!r}, not {FORMAT}")
            found = document["fingerprint"]
            cells = tuple(Cell(n, k, c, s, w) for n, k, c, s, w in document["cells"])
            if not isinstance(found, dict) or not cells or not all(map(_is_possible, cells)):
                raise CalibrationError(f"{path} is not a calibration: impossible cells, or none")
        except CalibrationError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CalibrationError(f"{path} is not a calibration: {error}") from error
        differing = [
            f"{name} is {fingerprint.get(name)!r} and was {found.get(name)!r}"
            for name in sorted({*fingerprint, *found})
            if fingerprint.get(name) != found.get(name)
        ]
        if differing:
            raise CalibrationError(f"{path} was measured on something else: {'; '.join(differing)}")
        return cls(found, cells)


def _is_possible(cell: Cell) -> bool:
    numbers = (cell.requests, cell.context, cell.seconds, cell.weight)
    return (
        isinstance(cell.k, int)
        and all(map(math.isfinite, numbers))
        and min(cell.requests - 1, cell.k, cell.context) >= 0
        and min(cell.seconds, cell.weight) > 0
    )


def plan(k_max: int, max_requests: int) -> Iterator[tuple[int, int]]:
    """(requests, K) to measure, in order of what they tell: the corners, then between them."""
    batches = [1]
    while batches[-1] * 4 <= max_requests:
        batches.append(batches[-1] * 4)
    if batches[-1] != max_requests:
        batches.append(max_requests)
    ends = {batches[0], batches[-1]}
    inner = [n for n in batches if n not in ends]
    outer = sorted(ends)
    between = dict.fromkeys(k for k in (k_max // 2, 1) if 0 < k < k_max)
    for k in dict.fromkeys((0, k_max)):
        yield from ((n, k) for n in outer)
    for k in dict.fromkeys((0, k_max)):
        yield from ((n, k) for n in inner)
    for k in between:
        yield from ((n, k) for n in batches)
