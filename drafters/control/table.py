"""The memory of measured steps: a cell for each batch bucket and K, and what they say of a load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from drafters.control.cost import Cell, CostModel

STEADY = 0.25  # a step belongs to a cell if its verified drafts are within this of requests * K
LIMIT = 0.4  # of a surprise, as a logarithm: a step that takes 20 times as long counts as 1.5
MEMORY = 200.0  # steps that a cell remembers
HALF_LIFE = 200.0  # steps elsewhere that halve what a cell counts for,
STALE = 4.0  # to as much as these
SHRINK = 0.5  # steps it takes to trust a cell's deviation as much as the fitted cost
NEAR = 0.05  # a cell tells as much of the next K as 1 / 21 of its steps at that K would
MATURE = 100.0  # steps from which on a surprise tells more of the machine than of the cell
DRIFT_GAIN = 0.1  # of a common slowdown: seen in 10 steps
HANDED = 0.25  # of the drift, at each fit, to the cells
KNOWN = 4096  # that were seen within so many steps
_LAST_BUCKET = 24  # 4,096 requests; more share it
_FIT_EVERY = 256  # steps; the first fits come at 1, 2, 4, ...


def bucket_of(requests: float) -> int:
    """Batches that share a cell: 1, 2, 3, 4, 5-6, 7-9, 10-13, ... (half an octave each)."""
    return min(_LAST_BUCKET, round(2.0 * math.log2(max(1.0, requests))))


class CostTable:
    """Seconds of a steady step at any batch and K, from steps measured at some of them.

    The fitted cost gives the shape, each cell the deviation from it that was measured. What
    slows all cells alike (another process, a hot device) is `drift`: it says nothing about which
    K is best, so it must not be held against the K that met it. Where a step is seen for the first
    time in a while, its surprise is its cell's: the drift is that of the steps before it. A drift
    that lasts becomes that of the cells that met it.
    """

    def __init__(self, k_max: int) -> None:
        self._k_max = k_max
        self._nearness = [NEAR / (NEAR + distance * distance) for distance in range(k_max + 1)]
        self._model = CostModel()
        self._rows: list[list[Cell | None]] = [
            [None] * (k_max + 1) for _ in range(_LAST_BUCKET + 1)
        ]
        self._drift = 0.0
        self._steps = 0

    @property
    def measured(self) -> bool:
        """Whether there is anything to estimate from."""
        return bool(self._model.coefficients)

    def load(self, cells: Iterable[Cell]) -> None:
        """Start from these cells."""
        for cell in cells:
            self._rows[bucket_of(cell.requests)][cell.k] = replace(cell)
        for _ in range(20):  # far from the guess: many sweeps
            self._fit()

    def cells(self) -> list[Cell]:
        """Every measured cell."""
        return [cell for row in self._rows for cell in row if cell is not None]

    def weight(self, requests: int, k: int) -> float:
        """Steps remembered about a batch and K."""
        cell = self._rows[bucket_of(requests)][k]
        return cell.weight if cell else 0.0

    def row(self, requests: int, context: float) -> list[float]:
        """Seconds at each K: [k_max + 1]."""
        cells = self._rows[bucket_of(requests)]
        row = self._model.row(requests, context, self._k_max)
        return [cost * math.exp(self._correction(cells, k)) for k, cost in enumerate(row)]

    def seconds(self, requests: int, k: int, context: float) -> float:
        """At one K."""
        correction = self._correction(self._rows[bucket_of(requests)], k)
        return self._model.seconds(requests, k, context) * math.exp(correction)

    def _correction(self, cells: list[Cell | None], k: int) -> float:
        """Log of what a step at K takes by these cells of its batch, over the fitted cost."""
        # The correction at a K nobody measured lies between those of the nearest measured.
        # Plain steps have no drafter and verify nothing: no K tells of them, nor they of it.
        weight, total = SHRINK, 0.0
        for cell in cells[1:] if k else cells[:1]:
            if cell is not None:
                near = cell.weight * self._nearness[abs(k - cell.k)]
                weight += near
                total += near * cell.correction
        return self._drift + total / weight

    def observe(self, requests: int, k: int, context: float, seconds: float) -> None:
        """One steady step."""
        row = self._rows[bucket_of(requests)]
        cell = row[k]
        if cell is None:
            if self.measured:
                expected = self.seconds(requests, k, context)
                seconds = expected * math.exp(_limited(math.log(seconds / expected)))
            cell = row[k] = Cell(requests, k, context, seconds * math.exp(-self._drift))
        else:
            stale = 0.5 ** ((self._steps - cell.seen) / HALF_LIFE)
            cell.weight = max(min(cell.weight, STALE), stale * cell.weight)
            # The cell's seconds at a batch and a context that are not quite its own.
            here = self._model.seconds(requests, k, context) * math.exp(cell.correction)
            surprise = _limited(math.log(seconds / here) - self._drift)
            self._drift += DRIFT_GAIN * cell.weight / (cell.weight + MATURE) * surprise
            gain = 1.0 / (min(cell.weight, MEMORY - 1.0) + 1.0)
            cell.weight = min(cell.weight + 1.0, MEMORY)
            cell.requests += gain * (requests - cell.requests)
            cell.context += gain * (context - cell.context)
            cell.seconds *= (here * math.exp(surprise) / cell.seconds) ** gain
        cell.seen = self._steps
        self._steps += 1
        if self._steps % _FIT_EVERY == 0 or self._steps & (self._steps - 1) == 0:
            self._fit()
        else:
            self._correct(cell)

    def _correct(self, cell: Cell) -> None:
        fitted = self._model.seconds(cell.requests, cell.k, cell.context)
        cell.correction = math.log(cell.seconds / fitted)

    def _fit(self) -> None:
        cells = self.cells()
        self._hand_on(cells)
        self._model.fit(cells)
        for cell in cells:
            self._correct(cell)

    def _hand_on(self, cells: Sequence[Cell]) -> None:
        # Steps just after a change of K are slower, and a cell takes them for its own; those after
        # them then look fast, and the drift takes them for the machine's. It would fall without
        # end, and make all cells that are never visited look cheap.
        handed = HANDED * self._drift
        self._drift -= handed
        for cell in cells:
            if cell.seen and self._steps - cell.seen < KNOWN:
                cell.seconds *= math.exp(handed)


def _limited(surprise: float) -> float:
    return max(-LIMIT, min(LIMIT, surprise))
