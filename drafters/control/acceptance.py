"""How far drafts are accepted, position by position, whatever K was when they were made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

PRIOR = 0.7  # of the first position: between the published heads' worst workload and their best
PRIOR_TRIALS = 16.0  # how many trials it takes to outweigh what was expected of a position
LONGEST = 0.95  # share of runs that may go on by one more token behind the last position
MEMORY = 1000.0  # trials of the first position that are remembered: 1.5% standard error


class Acceptance:
    """Conditional acceptance: position i, given that it was drafted and all before it accepted.

    Only drafts that were verified count as trials, so a K that varies does not bias the rates
    (a share of all steps would fall whenever fewer are drafted). A position that was seldom
    drafted of late falls back to what the one before it shows: published heads accept about
    the same share at each position behind the first. All positions forget at the pace of the
    first one's trials; while nothing is drafted nothing is forgotten.

    Easy text comes in runs. Many drafts a step take a run in one step, few in several, so that the
    steps of a small K lie in easy text more often than those of a large one: shares of all
    steps at one K say nothing of another. So only steps that begin a run count, those after a
    rejection, whose places in the text are the same at every K; a run of L tokens and its end then
    take 1 + floor(L / (K + 1)) steps. Where acceptance has no memory that is the sum over
    positions again. On the embedded model the sum is 10% too low for K = 3 after K = 11.
    """

    def __init__(self, k_max: int) -> None:
        self._hits = [0.0] * k_max
        self._trials = [0.0] * k_max

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """One step's verification; both as in `Step`, of fresh requests if that is known, and of
        any length."""
        if not drafted or not drafted[0]:
            return
        keep = max(0.0, 1.0 - drafted[0] / MEMORY)
        hits, trials = self._hits, self._trials
        # Requests that got as far as this position. Where fewer were drafted for than at the
        # position before (a request near its limit), the others stand for them.
        before = share = float(drafted[0])
        for i in range(len(hits)):
            hits[i] *= keep
            trials[i] *= keep
            if i < len(drafted) and drafted[i]:
                hits[i] += accepted[i]
                trials[i] += share * drafted[i] / before
                before, share = float(drafted[i]), float(accepted[i])
            else:
                share = 0.0

    def conditional(self) -> list[float]:
        """Expected acceptance of each position once it is reached: [k_max]."""
        rates, expected = [], PRIOR
        for hits, trials in zip(self._hits, self._trials, strict=True):
            expected = (hits + PRIOR_TRIALS * expected) / (trials + PRIOR_TRIALS)
            rates.append(min(1.0, expected))
        return rates

    def survival(self) -> list[float]:
        """Share of runs that reach each position: [k_max]."""
        return list(accumulate(self.conditional(), lambda reached, rate: reached * rate))

    def tokens(self) -> list[float]:
        """Expected tokens of a step, its own one included, after K drafts: [k_max + 1]."""
        survival = self.survival()
        size = len(survival)
        if not size:
            return [1.0]
        known, last = sum(survival), survival[-1]
        on = min(LONGEST, known / (1.0 + known - last))  # behind the last position, as before it
        run = 1.0 + known + last * on / (1.0 - on)  # tokens, with the one that ends it
        tokens = []
        for period in range(1, size + 2):  # tokens of a step all of whose drafts are accepted
            behind = period - size % period  # from the last position to the next end of a step
            more = last * on**behind / (1.0 - on**period)
            tokens.append(run / (1.0 + sum(survival[period - 1 :: period]) + more))
        return tokens

    @property
    def trials(self) -> list[float]:
        """Remembered trials of each position: the weight behind its rate."""
        return list(self._trials)
