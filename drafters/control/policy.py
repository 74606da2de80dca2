"""The interface between a scheduler and the policy that chooses K."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from drafters.control.sources.draft_plan import DraftPlan


class Load(NamedTuple):
    """What the scheduler knows when it has put a step together."""

    requests: int  # requests whose prompt ends in this step or before: each makes a token or more
    prefill_tokens: int = 0  # prompt tokens read in this step
    context_tokens: int = 0  # tokens in the KV cache that the step attends to, over all requests
    # Draft tokens that the step before made, of all requests: verified here, or cut by a grammar.
    draft_tokens: int = 0
    cut_tokens: int = 0  # of these the ones that were cut
    # [i]: how many of `requests` may have more than i draft tokens. Empty if no request has a limit
    # below the largest K.
    requests_by_draft_limit: tuple[int, ...] = ()
    # Whether CUDA graphs pad every request to K draft tokens, so that a limit saves no time.
    padded: bool = False
    # Whether no request may have drafts, those included whose prompt is only read in this step.
    drafts_off: bool = False

    def requests_drafted_at(self, position: int) -> int:
        """How many of the requests may have a draft token at `position`, counted from 0."""
        if not self.requests_by_draft_limit:
            return self.requests
        return self.requests_by_draft_limit[position]

    def draft_tokens_at(self, k: int) -> int:
        """Draft tokens of all requests at K, less what their limits forbid."""
        if not self.requests_by_draft_limit:
            return self.requests * k
        return sum(self.requests_by_draft_limit[:k])

    def mean_k(self, draft_tokens: int) -> int:
        """The K at which the requests have about so many draft tokens in all, at least 1 if any."""
        if not draft_tokens:
            return 0
        return max(1, round(draft_tokens / self.requests))

    def cost_k(self, k: int) -> int:
        """The K whose cost a step at `k` has: a smaller one where limits leave fewer draft tokens,
        unless CUDA graphs pad them."""
        return k if self.padded else self.mean_k(self.draft_tokens_at(k))


def counts_above(counts: Sequence[int]) -> tuple[int, ...]:
    """Turn a histogram into tail counts: [i] of the result is how many items are above i."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


def count_draft_limits(limits: Sequence[int], k_max: int) -> tuple[int, ...]:
    """`Load.requests_by_draft_limit` of requests with these largest K, 0 to `k_max` each."""
    counts = [0] * (k_max + 1)
    for limit in limits:
        counts[limit] += 1
    return counts_above(counts)


class SourceCounts(NamedTuple):
    """Draft tokens of a source other than the head that a step verified, by position."""

    source: str  # one of drafters.config.SOURCES
    drafted: tuple[int, ...]  # as `Step.drafted`
    accepted: tuple[int, ...]


class Match(NamedTuple):
    """The last tokens of a request also stand earlier in its text. Compares what followed there
    with what the next step made."""

    length: int  # tokens of the text's end that occur earlier
    compared: int  # tokens that the step made, at most as many as a lookup drafts
    equal: int  # how many of these, from the first on, a lookup would have drafted rightly


class Span(NamedTuple):
    """A grammar allowed one text only. Compares its tokens with those that the next step made."""

    compared: int  # tokens that the step made, up to the length of the span
    equal: int  # of those the first that were the span's


class Step(NamedTuple):
    """What a finished step took and made."""

    load: Load
    # K of the head's pass at the step's end, also where it only reads prompts; 0 where the plan of
    # the step's sources does without a pass.
    k: int
    seconds: float  # wall time without idling
    tokens: int  # output tokens it made
    # [i]: requests whose draft of the head at i was verified, or cut by a grammar
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]  # [i]: how many of those were accepted there and everywhere before
    target_seconds: float = 0.0  # of `seconds`: in the target, its inputs and the sampling
    draft_seconds: float = 0.0  # of `seconds`: in the drafter
    control_seconds: float = 0.0  # of `seconds`: choosing K, recording, learning if alone
    others: tuple[SourceCounts, ...] = ()  # verified drafts that were not the head's
    looked_up: int = 0  # requests that a lookup drafts for at the end of the step
    spans: tuple[Span, ...] = ()  # of grammars, before the step, drafted or not
    matches: tuple[Match, ...] = ()  # found at the end of the step before, drafted from or not
    missed_tokens_read: int = 0  # tokens of earlier steps that the head's pass read, too


class Policy(Protocol):
    """Chooses K for each step and learns from what the steps did.

    Calls come in step order, and each step that K is chosen for is observed. `choose` may have been
    called for later steps by then, and up to `max_unobserved_steps` are observed in a row.
    """

    @property
    def k_max(self) -> int:
        """The largest K: draft tokens per request and step."""

    @property
    def k_limit(self) -> int:
        """The largest K that `choose` may return next: the KV cache needs slots for its drafts."""

    @property
    def max_unobserved_steps(self) -> int:
        """Steps that may run before they are observed, all in a row."""

    def choose(self, load: Load) -> int:
        """K of the drafter pass at the end of the step that is being scheduled."""

    def plan(self) -> DraftPlan | None:
        """What each source is worth at the end of the step of the last `choose`; None where the
        head alone drafts."""

    def observe(self, step: Step) -> None:
        """Learn from a step that has run."""
