"""Which source drafts for each request of a step: by what the drafts of each are worth.

Worth is counted in tokens. The *gain* of a draft of n tokens is the tokens that are accepted of it,
less their *price*: the tokens that the batch would have made in the time that verifying n takes.
The scheduler knows these gains, and puts them into a plan; the worker alone knows the newest tokens
before the head's pass, and so which request has a match in its text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

# Matches with as many tokens as one of these or more, up to the next, are of one class: the longer
# the match, the more often the text goes on as it did before.
MATCH_CLASSES = (2, 3, 4, 5, 7, 10, 16)


def match_class(length: int) -> int:
    """The class of a match of `length` tokens, 2 or more: a place in MATCH_CLASSES."""
    return bisect_right(MATCH_CLASSES, length) - 1


class Worth(NamedTuple):
    """What drafts of one kind are worth."""

    tokens: int = 0  # draft tokens with the largest gain; 0 where none pays
    gain: float = 0.0


def best_worth(survival: Sequence[float], prices: Sequence[float]) -> Worth:
    """The number of draft tokens with the largest gain. `survival[i]` is the share of drafts that
    are accepted up to position i, `prices[n]` the price of verifying n draft tokens, in tokens."""
    gains = [right - price for right, price in zip(accumulate(survival), prices[1:], strict=False)]
    tokens = max(range(len(gains)), key=gains.__getitem__)
    return Worth(tokens + 1, gains[tokens]) if gains[tokens] > 0.0 else Worth()


class DraftPlan(NamedTuple):
    """What each source of drafts is worth in a step, in tokens."""

    lookups: tuple[Worth, ...]  # by class of the match
    # Where some request has a lookup that pays: the number of the head's tokens, at most K, with
    # the largest gain for one request, and that gain before the pass is paid for. 0 if none gains.
    head_k: int = 0
    head_gain: float = 0.0
    # Where none has: the gain of K tokens of the head for one request. It is never below its share
    # of the pass, as K was chosen with the pass paid for.
    alone_gain: float = 0.0
    pass_price: float = 0.0  # of a pass of the head for one request
    further_price: float = 0.0  # added for each further request of the pass
    read_price: float = 0.0  # of each token that the head must read first
    spans: tuple[float, ...] = ()  # gains of the first n tokens of a grammar's forced span, by n

    def span_tokens(self, length: int) -> int:
        """How many tokens of a forced span of `length` have the largest gain; 0 for none."""
        return max(range(min(length + 1, len(self.spans))), key=self.spans.__getitem__, default=0)


@dataclass(slots=True)
class Candidate:
    """A request that may have drafts at the end of a step."""

    limit: int  # the most draft tokens that it may have
    match: int = 0  # tokens of the match at the end of its text; 0 without one
    unread: int = 0  # tokens before this step's that the head has not read
    forgone: float = 0.0  # tokens that the head would have gained since it last read


class SourceChoice(NamedTuple):
    """The sources of a step's drafts."""

    k: int  # K of the head's pass, also of one that only reads prompts; 0 if there is none
    head: tuple[bool, ...]  # of each candidate, whether the head drafts for it
    lookups: tuple[int, ...]  # of each candidate, the draft tokens of its lookup; 0 for none


def choose_sources(
    plan: DraftPlan, k: int, candidates: Sequence[Candidate], *, reads_prompts: bool = False
) -> SourceChoice:
    """Choose the better source for each request, and whether the head's pass pays.

    If no request has a lookup that pays, the head drafts `k` tokens, as the controller chose. If
    some have, it drafts `plan.head_k` at most, and its pass runs only if it gains more over the
    lookups than its price. That price is not asked if the pass runs anyway, because it
    `reads_prompts`. A request with tokens that the head has not read waits until the gain that it
    missed meanwhile (`forgone`, updated here) covers their reading: the ski-rental rule (Karlin et
    al., 1988).
    """
    lookup_by_candidate = [
        plan.lookups[match_class(candidate.match)]
        if candidate.match and candidate.limit
        else Worth()
        for candidate in candidates
    ]
    beside_lookups = any(lookup.tokens for lookup in lookup_by_candidate)
    head_k, head_gain = k, plan.alone_gain
    if beside_lookups:
        head_k, head_gain = min(k, plan.head_k), plan.head_gain
    head_rows: list[int] = []  # candidates that the head drafts for, if its pass runs
    gained = 0.0
    if head_k:
        for row, (candidate, lookup) in enumerate(
            zip(candidates, lookup_by_candidate, strict=True)
        ):
            gain_over_lookup = head_gain - lookup.gain
            if not candidate.limit or gain_over_lookup <= 0.0:
                continue
            candidate.forgone += gain_over_lookup
            if candidate.forgone >= plan.read_price * candidate.unread:
                head_rows.append(row)
                gained += gain_over_lookup
    if head_rows and beside_lookups and not reads_prompts:
        price = plan.pass_price + (len(head_rows) - 1) * plan.further_price
        if gained <= price:
            head_rows = []
    if not head_rows:
        head_k = k if reads_prompts else 0
    by_head = [False] * len(candidates)
    for row in head_rows:
        by_head[row] = True
        candidates[row].forgone = 0.0
    lookups = tuple(
        0 if head else min(lookup.tokens, candidate.limit)
        for head, lookup, candidate in zip(by_head, lookup_by_candidate, candidates, strict=True)
    )
    return SourceChoice(head_k, tuple(by_head), lookups)
