"""Acceptance rates by draft position, estimated from steps of any K."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from drafters.control.policy import Load
from drafters.control.tuning import Tuning


class Acceptance:
    """Conditional acceptance by position: among drafts whose predecessors were all accepted.

    Only verified drafts count, so that a K that varies does not bias the rates. The prior of a
    position is the rate of the one before it. Counts fade by a discount, as in discounted UCB
    (Garivier and Moulines, 2011).
    """

    def __init__(self, k_max: int, tuning: Tuning) -> None:
        self._memory = tuning.memory
        self._hits = [0.0] * k_max
        self.trials = [0.0] * k_max  # of each position, less those that have faded
        self._prior_trials = tuning.averaging_steps  # weight of a prior; trials fade to no fewer
        if k_max:
            self.trials[0] = float(self._prior_trials)
            self._hits[0] = self._prior_trials * tuning.prior_acceptance

    def observe(self, requests: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step of `requests` requests; `drafted` and `accepted` are those of `Step`.
        Each request discounts old counts by 1 / `Tuning.memory`, also at K = 0, so that few new
        trials outweigh them after text that was not drafted."""
        hits, trials = self._hits, self.trials
        if not trials:
            return
        discount = 1.0 - min(1.0, requests / self._memory)
        discount = min(1.0, max(discount, self._prior_trials / trials[0]))
        # A request near its limit has fewer drafts: the other requests give the rate.
        before = reached = float(drafted[0]) if drafted else 0.0
        for i in range(len(trials)):
            hits[i] *= discount
            trials[i] *= discount
            if i < len(drafted) and drafted[i]:
                hits[i] += accepted[i]
                trials[i] += reached * drafted[i] / before
                before, reached = float(drafted[i]), float(accepted[i])
            else:
                reached = 0.0

    def conditional(self) -> list[float]:
        """Acceptance rate of each position if all before it are accepted: [k_max]."""
        prior, rate, rates = self._prior_trials, 0.0, []
        for i, (hits, trials) in enumerate(zip(self._hits, self.trials, strict=True)):
            rate = (hits + prior * rate) / (trials + prior) if i else hits / trials
            rates.append(min(1.0, rate))
        return rates

    def survival(self) -> list[float]:
        """Share of drafts that are accepted up to and including each position: [k_max]."""
        return list(accumulate(self.conditional(), mul))

    def tokens(self, load: Load) -> list[float]:
        """Expected tokens of a step at each K, over all requests: [k_max + 1]."""
        drafting = load.requests_by_draft_limit or (load.requests,) * len(self.trials)
        accepted = map(mul, drafting, self.survival())
        return list(accumulate(accepted, initial=float(load.requests)))
