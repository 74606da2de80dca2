"""What lookups are worth, learnt from how matches went on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drafters.control.acceptance import Acceptance
from drafters.control.policy import Step
from drafters.control.sources.draft_plan import MATCH_CLASSES, Worth, best_worth, match_class
from drafters.control.tuning import Tuning


class LookupGains:
    """The gains of lookups by class of the match.

    While lookups are in use, every match is compared with the tokens that came, drafted from or
    not. So it is known what lookups are worth while none drafts.
    """

    def __init__(self, max_lookup_tokens: int, tuning: Tuning) -> None:
        """`max_lookup_tokens` is the most draft tokens of a lookup."""
        self._acceptance = [
            Acceptance(max_lookup_tokens, replace(tuning, prior_acceptance=prior))
            for prior in tuning.prior_match_acceptance
        ]
        self._margin = tuning.lookup_margin

    def observe(self, step: Step) -> None:
        """Learn from the matches that the tokens of a step were compared with."""
        by_class: dict[int, list[tuple[int, int]]] = {}
        for length, compared, equal in step.matches:
            by_class.setdefault(match_class(length), []).append((compared, equal))
        for index, comparisons in by_class.items():
            self._acceptance[index].observe_comparisons(comparisons)

    def worth_by_class(self, prices: Sequence[float]) -> tuple[Worth, ...]:
        """What a lookup is worth, by class of the match. `prices[n]` is the tokens that the batch
        would make in the time of verifying n. One that gains less than `Tuning.lookup_margin` of
        its price is left out."""
        best = [best_worth(each.survival(), prices) for each in self._acceptance]
        return tuple(
            worth if worth.gain >= self._margin * prices[worth.tokens] else Worth()
            for worth in best
        )

    def rows(self) -> list[dict[str, Any]]:
        """A row of the state for each class of matches: the shortest match, how often its first
        token was right, and the mean number that a lookup of all tokens would have right."""
        return [
            {
                "match": shortest,
                "conditional": acceptance.conditional()[0],
                "tokens": math.fsum(acceptance.survival()),
                "trials": acceptance.observed_trials[0],
            }
            for shortest, acceptance in zip(MATCH_CLASSES, self._acceptance, strict=True)
        ]
