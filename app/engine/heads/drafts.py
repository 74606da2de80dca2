"""First draft tokens by generation of the head: what the page and the metrics show of each.

K adapts: a better head is given a larger K, and later positions are accepted less. So the share of
all draft tokens that were accepted can fall where the head is better. At position 1, which every
draft has, it says which head is better.
"""

from __future__ import annotations

from typing import Any

from app.observability import metrics
from drafters.config import HEAD
from drafters.learning.lineage import STARTED_WITH

MOST = 8  # generations that are shown: those that drafted last


class DraftsByGeneration:
    """Counts of the head's draft tokens at position 1, verified and accepted ones, by the
    generation that was in force when they were counted."""

    def __init__(self) -> None:
        self.generation = STARTED_WITH  # in force
        self._counts: dict[int, list[int]] = {}  # in the order in which they drafted last

    def count(self, state: dict[str, Any], last: dict[str, Any] | None) -> None:
        """Count what a state of the policy has more than the one before it of the same engine."""
        if HEAD not in state["available_sources"]:
            return  # the draft tokens are of vLLM's own lookup
        now = _at_position_1(state)
        before = [0, 0] if last is None else _at_position_1(last)
        if now[0] < before[0]:  # the policy began anew, and all of it is new
            before = [0, 0]
        new = [count - earlier for count, earlier in zip(now, before, strict=True)]
        if not any(new):
            return
        counts = self._counts.pop(self.generation, [0, 0])
        self._counts[self.generation] = [a + b for a, b in zip(counts, new, strict=True)]
        label = str(self.generation)
        metrics.HEAD_FIRST_DRAFTED.labels(label).inc(new[0])
        metrics.HEAD_FIRST_ACCEPTED.labels(label).inc(new[1])
        while len(self._counts) > MOST:  # labels are bounded
            oldest = next(iter(self._counts))
            del self._counts[oldest]
            for counter in (metrics.HEAD_FIRST_DRAFTED, metrics.HEAD_FIRST_ACCEPTED):
                counter.remove(str(oldest))

    def rows(self) -> list[dict[str, int]]:
        """The counts of each generation, the lowest number first."""
        return [
            {"generation": number, "first_drafted": drafted, "first_accepted": accepted}
            for number, (drafted, accepted) in sorted(self._counts.items())
        ]


def _at_position_1(state: dict[str, Any]) -> list[int]:
    """How many draft tokens of the head were verified at position 1, and how many accepted."""
    totals = state["totals"]
    return [totals["drafted"][0], totals["accepted"][0]]
