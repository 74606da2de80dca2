"""Counts of a request's draft tokens by source, and how they travel to the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from drafters.config import SOURCES


def _zeros() -> list[int]:
    return [0] * len(SOURCES)


@dataclass
class RequestSourceCounts:
    """Draft tokens of one request by source, in the order of SOURCES, from all steps so far.

    They travel in the two lists of vLLM's RequestSpecDecodeMetrics, of a request that asked where
    its tokens come from: `per_step_drafted` has `verified`, and `per_step_accepted` has `accepted`.
    vLLM leaves both lists empty at the level "summary", and no other field takes the counts: the
    type of an engine core's output is fixed. In one step a request has drafts of one source, so
    that what an output adds to the counts tells the source of its tokens.
    """

    verified: list[int] = field(default_factory=_zeros)
    accepted: list[int] = field(default_factory=_zeros)

    def add(self, source: str, verified: int, accepted: int) -> None:
        """Count the drafts of a step."""
        place = SOURCES.index(source)
        self.verified[place] += verified
        self.accepted[place] += accepted

    def attached_to(self, metrics: Any) -> Any:
        """A copy of a request's RequestSpecDecodeMetrics with these counts."""
        return replace(
            metrics,
            histogram=list(metrics.histogram),
            per_step_drafted=list(self.verified),
            per_step_accepted=list(self.accepted),
        )
