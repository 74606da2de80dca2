"""Acceptance rates by draft position, estimated from steps of any K."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drafters.control.policy import Load, counts_above
from drafters.control.tuning import Tuning


class Acceptance:
    """The share of draft tokens that the target accepts at each position, among those whose
    predecessors in the same draft were all accepted.

    Only verified draft tokens count, so that a K that varies does not bias the rates. The prior of
    a position is the rate of the one before it. Counts fade: the newest requests weigh most.
    """

    def __init__(self, k_max: int, tuning: Tuning) -> None:
        self._tuning = tuning
        self._observed = False  # whether there was a draft: the rates are a prior until then
        # Decayed counts by position: draft tokens that were verified after all before them had been
        # accepted (`trials`), and how many of these were accepted too (`_hits`).
        self._hits = [0.0] * k_max
        self.trials = [0.0] * k_max
        if k_max:
            self.trials[0] = tuning.prior_trials
            self._hits[0] = tuning.prior_trials * tuning.prior_acceptance

    @property
    def observed_trials(self) -> list[float]:
        """`trials`, but none before the first draft: [k_max]."""
        return self.trials if self._observed else [0.0] * len(self.trials)

    def observe(self, requests: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step of `requests` requests; `drafted` and `accepted` are those of `Step`.

        Each request discounts old counts, also at K = 0, so that few new trials outweigh them after
        text that was not drafted.
        """
        # A request near its limit has fewer draft tokens. Trials of a position are the requests
        # accepted up to the one before, times the share of requests that have a draft token there.
        drafted_before = float(drafted[0]) if drafted else 0.0
        accepted_before = drafted_before
        trials = []
        for count, hits in zip(drafted, accepted, strict=False):
            if not count:
                break
            trials.append(accepted_before * count / drafted_before)
            drafted_before = float(count)
            accepted_before = float(hits)
        self._add(requests, trials, accepted)

    def observe_comparisons(self, comparisons: Iterable[tuple[int, int]]) -> None:
        """Learn from pairs (compared, equal), one for each draft: its first `compared` tokens were
        compared with the text that came, and the first `equal` of them are those of the text. Such
        drafts may never have been verified."""
        by_tried, by_equal = [0] * (len(self.trials) + 1), [0] * (len(self.trials) + 1)
        for compared, equal in comparisons:
            by_tried[min(compared, equal + 1)] += 1  # up to the first that was not equal
            by_equal[equal] += 1
        self._add(sum(by_tried), counts_above(by_tried), counts_above(by_equal))

    def _add(self, requests: int, trials: Sequence[float], hits: Sequence[int]) -> None:
        """Discount the old counts by so many requests, and add new ones by position."""
        if not self.trials:
            return
        self._fade(requests)
        for i, (tried, hit) in enumerate(zip(trials, hits, strict=False)):
            if i < len(self.trials) and tried:
                self._observed = True
                self.trials[i] += tried
                self._hits[i] += hit

    def limit_trials(self, trials: float) -> None:
        """Let what was seen so far weigh no more than so many trials of the first position: another
        head drafts from now on, much like the one before."""
        if self.trials and self.trials[0] > trials:
            share = trials / self.trials[0]
            self._hits = [share * hits for hits in self._hits]
            self.trials = [share * count for count in self.trials]

    def _fade(self, requests: int) -> None:
        """Discount all counts, but leave the first position as many trials as its prior."""
        discount = 1.0 - min(1.0, requests / self._tuning.acceptance_memory)
        discount = min(1.0, max(discount, self._tuning.prior_trials / self.trials[0]))
        for i in range(len(self.trials)):
            self._hits[i] *= discount
            self.trials[i] *= discount

    def conditional(self) -> list[float]:
        """Acceptance rate of each position if all before it are accepted: [k_max]."""
        if not self.trials:
            return []
        prior_trials = self._tuning.prior_trials
        rate = self._hits[0] / self.trials[0]
        rates = [min(1.0, rate)]
        for hits, trials in zip(self._hits[1:], self.trials[1:], strict=True):
            rate = (hits + prior_trials * rate) / (trials + prior_trials)
            rates.append(min(1.0, rate))
        return rates

    def survival(self) -> list[float]:
        """Share of drafts that are accepted up to and including each position: [k_max]."""
        shares = []
        share = 1.0
        for rate in self.conditional():
            share *= rate
            shares.append(share)
        return shares

    def tokens(self, load: Load) -> list[float]:
        """Expected tokens of a step at each K, over all requests of `load`: [k_max + 1]."""
        tokens = float(load.requests)  # the target's own
        expected = [tokens]
        for position, share in enumerate(self.survival()):
            tokens += load.requests_drafted_at(position) * share
            expected.append(tokens)
        return expected
