"""What a scheduler and a policy of K tell each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from drafters.control.calibration import Cell


class Load(NamedTuple):
    """What the scheduler knows when it lays out a step."""

    requests: int  # requests that have all of their prompt read: each makes a token or more
    waiting: int = 0  # requests in the queue
    prefill_tokens: int = 0  # prompt tokens read in this step
    context_tokens: int = 0  # tokens in the KV cache that the step attends to, over all requests
    draft_tokens: int = 0  # drafts of the previous step that this step verifies, over all requests
    # [i]: of `requests` those that may have more than i drafts; empty: all may, whatever K is.
    reach: tuple[int, ...] = ()

    def drafts(self, k: int) -> int:
        """Draft tokens of all requests at K."""
        return sum(self.reach[:k]) if self.reach else self.requests * k


def at_least(counts: Sequence[int]) -> tuple[int, ...]:
    """From how many counted 0, 1, 2, ...; [i]: how many counted i + 1 or more."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


def reach(limits: Sequence[int], k_max: int) -> tuple[int, ...]:
    """Of a Load, from the most drafts, 0 to `k_max`, of each of its requests."""
    counts = [0] * (k_max + 1)
    for limit in limits:
        counts[limit] += 1
    return at_least(counts)


class Step(NamedTuple):
    """What a step did."""

    load: Load
    k: int  # tokens asked of the drafter per request at the end of this step; 0: no drafter pass
    seconds: float  # wall time without idling
    tokens: int  # output tokens it made
    drafted: tuple[int, ...]  # [i]: requests whose draft at position i was verified in this step
    accepted: tuple[int, ...]  # [i], as many: of those, accepted there and at all before
    target_seconds: float = 0.0  # of `seconds`: in the target, its inputs and the sampling
    draft_seconds: float = 0.0  # of `seconds`: in the drafter
    # Of `seconds`: choosing K, counting what came of it, and learning from that where nothing else
    # runs meanwhile.
    control_seconds: float = 0.0


class Policy(Protocol):
    """Chooses K for each step and learns from what the steps did.

    Calls come in step order. `observe` of a step comes after `choose` of the next one, while that
    runs, or later, with those of up to `patience` steps in all; steps that made nothing need not be
    observed.
    """

    @property
    def k_max(self) -> int:
        """The most tokens that may be drafted."""
        ...

    @property
    def most(self) -> int:
        """The most that may be asked for at the end of the next step: places in the KV cache are
        reserved for so many."""
        ...

    @property
    def patience(self) -> int:
        """Steps that may be observed one after the other once all of them have run."""
        ...

    def choose(self, load: Load) -> int:
        """K of the drafter pass at the end of the step that is being laid out."""
        ...

    def observe(self, step: Step) -> None:
        """Learn from a step that has run."""
        ...


class SteerablePolicy(Policy, Protocol):
    """A policy that start-up calibrates, that is told what to achieve, and that tells its state."""

    def begin_with(self, cells: Iterable[Cell]) -> None:
        """Take measured costs for granted until steps say otherwise; forget all steps so far."""
        ...

    def steer(
        self, *, objective: str | None = None, k: int | None = None, tpot_s: float | None = None
    ) -> None:
        """Change `objective`, `k` or `tpot_s`; raises ObjectiveError."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data for JSON."""
        ...
