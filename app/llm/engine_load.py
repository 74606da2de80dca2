"""Load of the engine, as its schedulers last reported it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# A running engine reports at every step. Older figures are of an engine that has nothing to do.
STALE_S = 2.0


@dataclass(frozen=True)
class SchedulerReport:
    """One scheduler's load after a step."""

    running: int
    queued: int  # waiting for room
    deferred: int  # waiting for something else: a grammar that is being compiled
    kv_usage: float
    at: float


@dataclass
class EngineLoad:
    """Load summed over all schedulers (one, unless the engine runs data-parallel copies)."""

    capacity: int = 0  # sequences in one batch, all copies together; 0 before the engine is up
    copies: int = 1  # of the engine (data-parallel), which share `capacity`
    clock: Callable[[], float] = time.monotonic
    on_step: Callable[[], None] | None = None
    _reports: dict[int, SchedulerReport] = field(default_factory=dict)

    def update(self, index: int, running: int, queued: int, deferred: int, kv_usage: float) -> None:
        """Record a step of scheduler `index`, and call `on_step`."""
        self._reports[index] = SchedulerReport(running, queued, deferred, kv_usage, self.clock())
        if self.on_step is not None:
            self.on_step()

    def clear(self) -> None:
        """Forget all reports, which were of an engine that is gone."""
        self._reports.clear()

    @property
    def copy_capacity(self) -> int:
        """Sequences in one batch of one copy."""
        return self.capacity // self.copies

    @property
    def running(self) -> int:
        """Requests in the batches, by the last report of each scheduler, however old."""
        return sum(report.running for report in self._reports.values())

    @property
    def deferred(self) -> int:
        """Requests among `waiting` that wait for something else than room."""
        return sum(report.deferred for report in self._reports.values())

    @property
    def waiting(self) -> int:
        """Requests that the schedulers have taken and not begun.

        The last report of each counts, however old: a scheduler that is stuck in a step reports
        nothing, and its requests still wait.
        """
        return sum(report.queued + report.deferred for report in self._reports.values())

    @property
    def queued(self) -> int:
        """Requests among `waiting` that wait because the engine is full."""
        return sum(report.queued for report in self._fresh())

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, of the scheduler whose cache is fullest."""
        return max((report.kv_usage for report in self._fresh()), default=0.0)

    def _fresh(self) -> list[SchedulerReport]:
        now = self.clock()
        return [report for report in self._reports.values() if now - report.at <= STALE_S]
