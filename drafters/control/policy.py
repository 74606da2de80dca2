"""What a scheduler and a policy of K tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol


class Load(NamedTuple):
    """What the scheduler knows when it lays out a step."""

    requests: int  # requests that have all of their prompt read: each makes a token or more
    waiting: int = 0  # requests in the queue
    prefill_tokens: int = 0  # prompt tokens read in this step
    context_tokens: int = 0  # tokens in the KV cache that the step attends to, over all requests
    draft_tokens: int = 0  # drafts of the previous step that this step verifies, over all requests
    # [i]: of `requests` those that may have more than i drafts; empty: all may, whatever K is.
    requests_by_draft_limit: tuple[int, ...] = ()

    def drafts(self, k: int) -> int:
        """Draft tokens of all requests at K."""
        limited = self.requests_by_draft_limit
        return sum(limited[:k]) if limited else self.requests * k


def at_least(counts: Sequence[int]) -> tuple[int, ...]:
    """`counts[i]`: how many have exactly i. Returned [i]: how many have i + 1 or more."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


def requests_by_draft_limit(limits: Sequence[int], k_max: int) -> tuple[int, ...]:
    """A Load's, of requests that may have these most drafts, 0 to `k_max`, each."""
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
    runs, or later, with those of up to `max_deferred_steps` steps in all. Steps that made nothing
    need not be observed.
    """

    @property
    def k_max(self) -> int:
        """The most tokens that may be drafted."""
        ...

    @property
    def k_limit(self) -> int:
        """The most that may be asked for at the end of the next step: places in the KV cache are
        reserved for so many."""
        ...

    @property
    def max_deferred_steps(self) -> int:
        """Steps that may be observed one after the other once all of them have run."""
        ...

    def choose(self, load: Load) -> int:
        """K of the drafter pass at the end of the step that is being laid out."""
        ...

    def observe(self, step: Step) -> None:
        """Learn from a step that has run."""
        ...
