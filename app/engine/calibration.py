"""Calibration at start-up: steps of a few batches and K are timed before the first request."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from statistics import median

from drafters.config import captured_ks
from drafters.control.cost_table import Cell

# (requests, K) -> seconds of steady steps at that batch and K, at least one.
Measure = Callable[[int, int], Sequence[float]]


def calibrate(
    measure: Measure,
    clock: Callable[[], float],
    *,
    k_max: int,
    max_requests: int,
    budget_s: float,
) -> tuple[Cell, ...]:
    """Measure the cells of `calibration`, one after the other."""
    asking = calibration(clock, k_max=k_max, max_requests=max_requests, budget_s=budget_s)
    try:
        cell = next(asking)
        while True:
            cell = asking.send(measure(*cell))
    except StopIteration as end:
        cells: tuple[Cell, ...] = end.value
        return cells


def calibration(
    clock: Callable[[], float], *, k_max: int, max_requests: int, budget_s: float
) -> Generator[tuple[int, int], Sequence[float], tuple[Cell, ...]]:
    """Yield (requests, K) to measure, and be sent the seconds of its steps; returns the cells.

    It ends when all cells of `plan`, the most informative first, are measured or time is up. A cell
    is left out if, by the time that others took, it would take more than what is left of
    `budget_s`, or with drafts more than a quarter of all of it: a machine that is busy with so many
    tokens for so long will not draft them. The first cell is never left out.
    """
    start = clock()
    cells: list[Cell] = []
    took: list[tuple[int, float]] = []  # tokens of a step, seconds of the cell
    for requests, k in plan(k_max, max_requests):
        began, tokens = clock(), requests * (1 + k)
        left = start + budget_s - began
        if k == 0:
            likely = max((seconds for _, seconds in took), default=0.0)
        else:  # no longer than a cell with more tokens, or in proportion to one with fewer
            likely = min(seconds * max(1.0, tokens / n) for n, seconds in took)
            left = min(left, budget_s / 4.0)
        if cells and likely > left:
            continue
        seconds = yield requests, k
        cells.append(Cell(requests, k, median(seconds), len(seconds)))
        took.append((tokens, clock() - began))
    return tuple(cells)


def plan(k_max: int, max_requests: int) -> Iterator[tuple[int, int]]:
    """Yield (requests, K) to measure, the most informative first: corners, then between them."""
    batches = [1]
    while batches[-1] * 4 <= max_requests:
        batches.append(batches[-1] * 4)
    if batches[-1] != max_requests:
        batches.append(max_requests)
    corners = sorted({batches[0], batches[-1]})
    for part in (corners, [n for n in batches if n not in corners]):
        for k in dict.fromkeys((0, k_max)):
            yield from ((n, k) for n in part)
    half = max(k for k in captured_ks(k_max) if k <= k_max // 2)  # a K that any engine may choose
    for k in dict.fromkeys(k for k in (half, 1) if 0 < k < k_max):
        yield from ((n, k) for n in batches)
