"""Acceptance rates by draft position, estimated from steps of any K."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from drafters.control.tuning import Tuning


class Acceptance:
    """Conditional acceptance by position: among drafts whose predecessors were all accepted.

    Only drafts that were verified count, so that a K that varies does not bias the rates. A
    position that was seldom drafted lately is taken to be like the one before it.
    """

    def __init__(self, k_max: int, tuning: Tuning) -> None:
        self._tuning = tuning
        self._hits = [0.0] * k_max
        self._trials = [0.0] * k_max
        if k_max:
            self._trials[0] = float(tuning.enough)
            self._hits[0] = tuning.enough * tuning.prior_acceptance

    def observe(self, requests: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step of `requests` requests; `drafted` and `accepted` are those of `Step`.

        Old trials fade with each token, also at K = 0: after text that was not drafted they say
        little, so that new trials soon outweigh them.
        """
        hits, trials, tuning = self._hits, self._trials, self._tuning
        if not trials:
            return
        fading = 1.0 - min(1.0, requests / tuning.memory_trials)
        keep = min(1.0, max(fading, tuning.enough / trials[0]))
        # A request near its limit has fewer drafts: the other requests give the rate.
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
        """Acceptance rate of each position if all before it are accepted: [k_max]."""
        prior, rate, rates = self._tuning.enough, 0.0, []
        for i, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
            rate = (hits + prior * rate) / (trials + prior) if i else hits / trials
            rates.append(min(1.0, rate))
        return rates

    def survival(self) -> list[float]:
        """Share of drafts that are accepted up to and including each position: [k_max]."""
        return list(accumulate(self.conditional(), lambda reached, rate: reached * rate))

    @property
    def trials(self) -> list[float]:
        """Trials of each position, less those that have faded: [k_max]."""
        return list(self._trials)
