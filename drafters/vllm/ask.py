"""What a drafter is asked for at the end of a step, and how it learns of that."""

from __future__ import annotations

from typing import Any, NamedTuple

_ATTRIBUTE = "aerie_ask"  # of a SchedulerOutput, which is pickled with all it has


class Ask(NamedTuple):
    """One decision for all ranks. vLLM's own field has the K as well, it reads that itself."""

    k: int = 0
    least_confidence: float = 0.0  # 0: drafts are offered whatever the drafter thinks of them
    grows: bool = False  # drafts grow with runs (runs.py)

    def attach(self, scheduled: Any) -> None:
        """Tell the workers with a SchedulerOutput."""
        setattr(scheduled, _ATTRIBUTE, self)

    @classmethod
    def of(cls, scheduled: Any) -> Ask:
        """Nothing where nothing was said."""
        found: Ask = getattr(scheduled, _ATTRIBUTE, None) or cls()
        return found

    @property
    def doubts(self) -> bool:
        """Whether the drafter may offer fewer."""
        return self.least_confidence > 0.0

    def beyond(self, limit: int, run: int) -> int:
        """Drafts beyond K of a request that may have `limit` and is so far into a run."""
        return max(0, min(limit - self.k, run)) if self.grows and self.k else 0

    def left_out(self, limit: int, run: int, drafts: int) -> int:
        """Of a request that was offered so many."""
        asked = min(self.k, limit) + self.beyond(limit, run)
        return max(0, asked - drafts) if self.doubts else 0
