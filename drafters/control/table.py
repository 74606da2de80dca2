"""The memory of measured steps: a row for each batch bucket, and what they say of a load."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from drafters.control.cost import Cell, CostModel
from drafters.control.row import LIMIT, Row

STEADY = 0.25  # a step belongs to a cell if its verified drafts are within this of requests * K
MEMORY = 200.0  # steps that a cell's means are of
_LAST_BUCKET = 24  # 4,096 requests; more share it
_FIT_EVERY = 256  # steps; the first fits come at 1, 2, 4, ...


@lru_cache(maxsize=4096)
def bucket_of(requests: float) -> int:
    """Batches that share a row: 1, 2, 3, 4, 5-6, 7-9, 10-13, ... (half an octave each)."""
    return min(_LAST_BUCKET, round(2.0 * math.log2(max(1.0, requests))))


class CostTable:
    """Seconds of a steady step at any batch and K, from steps measured at some of them.

    A step may have had more drafts than K of each request, or fewer, over all requests as many as
    `beyond` says: the fitted cost knows what one more takes, so that a row is of K alone.

    The fitted cost gives the shape, each row the deviation from it that was measured, and what
    slows all K of it alike (row.py). The fit is to what steps have taken, at whatever pace.
    """

    row_type = Row

    def __init__(self, k_max: int) -> None:
        self._k_max = k_max
        self._model = CostModel()
        self._rows: dict[int, Row] = {}
        self._cells: dict[tuple[int, int], Cell] = {}  # by bucket and K
        self._measured_at: dict[tuple[int, int], float] = {}  # by bucket and K, by the clock
        self._steps = 0
        self._now = 0.0  # seconds of all steps

    @property
    def measured(self) -> bool:
        """Whether there is anything to estimate from."""
        return bool(self._model.coefficients)

    def load(self, cells: Iterable[Cell]) -> None:
        """Start from these cells."""
        self._cells.update({(bucket_of(c.requests), c.k): replace(c) for c in cells})
        self._measured_at.update(dict.fromkeys(self._cells, time.monotonic()))
        for _ in range(20):  # far from the guess: many sweeps
            self._model.fit(self.cells())
        for (bucket, k), cell in self._cells.items():
            fitted = self._model.seconds(cell.requests, k, cell.context, cell.beyond)
            self._row(bucket).calibrate(k, math.log(cell.seconds / fitted), cell.weight)

    def cells(self) -> list[Cell]:
        """Every measured cell."""
        return list(self._cells.values())

    def weight(self, requests: int, k: int) -> float:
        """Steps remembered about a batch and K."""
        cell = self._cells.get((bucket_of(requests), k))
        return cell.weight if cell else 0.0

    def age_s(self, requests: int, k: int) -> float:
        """Seconds by the clock since a step of a batch and K was last measured; 0 if never."""
        then = self._measured_at.get((bucket_of(requests), k))
        return 0.0 if then is None else time.monotonic() - then

    def row(self, requests: int, context: float, beyond: Sequence[float] = ()) -> list[float]:
        """Seconds at each K, where `beyond` is said with so many drafts more: [k_max + 1]."""
        fitted = self._model.row(requests, context, beyond or [0.0] * (self._k_max + 1))
        row = self._rows.get(bucket_of(requests))
        if row is None:
            return fitted
        return [seconds * math.exp(row.of(k)) for k, seconds in enumerate(fitted)]

    def seconds(self, requests: int, k: int, context: float, beyond: float = 0.0) -> float:
        """At one K."""
        fitted = self._model.seconds(requests, k, context, beyond)
        row = self._rows.get(bucket_of(requests))
        return fitted if row is None else fitted * math.exp(row.of(k))

    def observe(
        self, requests: int, k: int, context: float, seconds: float, beyond: float = 0.0
    ) -> None:
        """One steady step."""
        self._now += seconds
        bucket = bucket_of(requests)
        self._measured_at[bucket, k] = time.monotonic()
        cell = self._cells.get((bucket, k))
        if cell is None:
            cell = self._cells[bucket, k] = Cell(requests, k, context, seconds, 0.0)
        cell.weight = min(cell.weight + 1.0, MEMORY)
        cell.requests += (requests - cell.requests) / cell.weight
        cell.context += (context - cell.context) / cell.weight
        cell.beyond += (beyond - cell.beyond) / cell.weight
        surprise = min(LIMIT, math.log(seconds / cell.seconds))
        cell.seconds *= math.exp(surprise / cell.weight)
        if not self.measured:
            self._fit()
        ratio = math.log(seconds / self._model.seconds(requests, k, context, beyond))
        self._row(bucket).learn(k, ratio, seconds, self._now)
        self._steps += 1
        if self._steps % _FIT_EVERY == 0 or self._steps & (self._steps - 1) == 0:
            self._fit()

    def _row(self, bucket: int) -> Row:
        if bucket not in self._rows:
            self._rows[bucket] = self.row_type(self._k_max, self._now)
        return self._rows[bucket]

    def _fit(self) -> None:
        at = {}  # the middle of each row, and what the fit has said of it so far
        for bucket in self._rows:
            cells = {k: c for k in range(self._k_max + 1) if (c := self._cells.get((bucket, k)))}
            weight = sum(cell.weight for cell in cells.values())
            requests = sum(cell.weight * cell.requests for cell in cells.values()) / weight
            context = sum(cell.weight * cell.context for cell in cells.values()) / weight
            beyond = [cells[k].beyond if k in cells else 0.0 for k in range(self._k_max + 1)]
            middle = requests, context, beyond
            at[bucket] = middle, self._model.row(*middle), [k in cells for k in range(len(beyond))]
        self._model.fit(self.cells())
        for bucket, (middle, before, measured) in at.items():
            now = self._model.row(*middle)
            shifts = [math.log(b / a) for a, b in zip(before, now, strict=True)]
            self._rows[bucket].refit(shifts, measured)
