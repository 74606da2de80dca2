"""How far drafts are accepted, whatever K was when they were made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from drafters.control.tuning import Tuning


class Acceptance:
    """Acceptance by position, conditional: of drafts whose predecessors were all accepted.

    Only drafts that were verified count, so that a K that varies does not bias the rates. A
    position that was seldom drafted of late is thought to be like the one before it.
    """

    def __init__(self, k_max: int, tuning: Tuning) -> None:
        self._tuning = tuning
        self._hits = [0.0] * k_max
        self._trials = [0.0] * k_max
        if k_max:
            self._trials[0] = float(tuning.enough)
            self._hits[0] = tuning.enough * tuning.prior_acceptance

    def observe(self, requests: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step of so many requests; `drafted` and `accepted` are a Step's.

        Evidence fades with the text, also while none of it is drafted: what drafts are worth in
        text that nobody drafted is soon a matter of few trials, so that new ones count.
        """
        hits, trials, tuning = self._hits, self._trials, self._tuning
        if not trials:
            return
        fading = 1.0 - min(1.0, requests / tuning.memory_trials)
        keep = min(1.0, max(fading, tuning.enough / trials[0]))
        # A request near its limit has fewer drafts; the others stand for it.
        before = reached = float(drafted[0]) if drafted else 0.0
        for i in range(len(trials)):
            hits[i] *= keep
            trials[i] *= keep
            if i < len(drafted) and drafted[i]:
                hits[i] += accepted[i]
                trials[i] += reached * drafted[i] / before
                before, reached = float(drafted[i]), float(accepted[i])
            else:
                reached = 0.0

    def conditional(self) -> list[float]:
        """Acceptance of each position once it is reached: [k_max]."""
        prior, rate, rates = self._tuning.enough, 0.0, []
        for i, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
            rate = (hits + prior * rate) / (trials + prior) if i else hits / trials
            rates.append(min(1.0, rate))
        return rates

    def survival(self) -> list[float]:
        """Share of steps that accept up to each position: [k_max]."""
        return list(accumulate(self.conditional(), lambda reached, rate: reached * rate))

    @property
    def trials(self) -> list[float]:
        """Remembered trials of each position."""
        return list(self._trials)
