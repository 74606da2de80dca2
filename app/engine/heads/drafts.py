"""Drafts by generation of the head: what the page and the metrics show of each."""

from __future__ import annotations

from typing import Any

from app.observability import metrics
from drafters.config import HEAD
from drafters.learning.lineage import STARTED_WITH

MOST = 8  # generations that are shown: those that drafted last


class DraftsByGeneration:
    """Counts of the head's draft tokens, verified and accepted ones, by the generation that was in
    force when they were counted."""

    def __init__(self) -> None:
        self.generation = STARTED_WITH  # in force
        self._counts: dict[int, list[int]] = {}  # in the order in which they drafted last

    def count(self, state: dict[str, Any], last: dict[str, Any] | None) -> None:
        """Count what a state of the policy has more than the one before it of the same engine."""
        now = state["totals"]["sources"][HEAD]
        before = last["totals"]["sources"][HEAD] if last is not None else {}
        # Less than before: the policy began anew, and all of it is new.
        began_anew = now["drafted"] < before.get("drafted", 0)
        new = [
            now[name] - (0 if began_anew else before.get(name, 0))
            for name in ("drafted", "accepted")
        ]
        if not any(new):
            return
        counts = self._counts.pop(self.generation, [0, 0])
        self._counts[self.generation] = [a + b for a, b in zip(counts, new, strict=True)]
        label = str(self.generation)
        metrics.HEAD_DRAFTED.labels(label).inc(new[0])
        metrics.HEAD_ACCEPTED.labels(label).inc(new[1])
        while len(self._counts) > MOST:  # labels are bounded
            oldest = next(iter(self._counts))
            del self._counts[oldest]
            for counter in (metrics.HEAD_DRAFTED, metrics.HEAD_ACCEPTED):
                counter.remove(str(oldest))

    def rows(self) -> list[dict[str, int]]:
        """The counts of each generation, the lowest number first."""
        return [
            {"generation": number, "drafted": drafted, "accepted": accepted}
            for number, (drafted, accepted) in sorted(self._counts.items())
        ]
