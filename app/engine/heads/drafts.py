"""Drafts by generation of the head: what the page and the metrics show of each.

What compares heads is how many tokens of a draft are accepted: a better head has more of them
accepted, and is given a larger K. Shares do not. Of all its draft tokens a better head has fewer
accepted, as later positions are accepted less. Of its first tokens it may have fewer too: easy text
comes in runs, which a better head passes in fewer drafts, so that more of its drafts are made where
the text is hard.
"""

from __future__ import annotations

from typing import Any

from app.observability import metrics
from drafters.config import HEAD
from drafters.learning.lineage import STARTED_WITH

MOST = 8  # generations that are shown: those that drafted last


class DraftsByGeneration:
    """Counts of the head's drafts that were verified, one for each request and step, and of their
    accepted tokens, by the generation that was in force when they were counted."""

    def __init__(self) -> None:
        self.generation = STARTED_WITH  # in force
        self._counts: dict[int, list[int]] = {}  # in the order in which they drafted last

    def count(self, state: dict[str, Any], last: dict[str, Any] | None) -> None:
        """Count what a state of the policy has more than the one before it of the same engine."""
        if HEAD not in state["available_sources"]:
            return  # the draft tokens are of vLLM's own lookup
        now = _drafts_and_accepted(state)
        before = [0, 0] if last is None else _drafts_and_accepted(last)
        if now[0] < before[0]:  # the policy began anew, and all of it is new
            before = [0, 0]
        new = [count - earlier for count, earlier in zip(now, before, strict=True)]
        if not any(new):
            return
        counts = self._counts.pop(self.generation, [0, 0])
        self._counts[self.generation] = [a + b for a, b in zip(counts, new, strict=True)]
        label = str(self.generation)
        metrics.HEAD_DRAFTS.labels(label).inc(new[0])
        metrics.HEAD_ACCEPTED.labels(label).inc(new[1])
        while len(self._counts) > MOST:  # labels are bounded
            oldest = next(iter(self._counts))
            del self._counts[oldest]
            for counter in (metrics.HEAD_DRAFTS, metrics.HEAD_ACCEPTED):
                counter.remove(str(oldest))

    def rows(self) -> list[dict[str, int]]:
        """The counts of each generation, the lowest number first."""
        return [
            {"generation": number, "drafts": drafts, "accepted": accepted}
            for number, (drafts, accepted) in sorted(self._counts.items())
        ]


def _drafts_and_accepted(state: dict[str, Any]) -> list[int]:
    """How many drafts of the head were verified, and how many of their tokens accepted."""
    totals = state["totals"]
    return [totals["drafted"][0], sum(totals["accepted"])]
