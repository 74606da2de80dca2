"""How far drafts are accepted, whatever K was when they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from drafters.control.growing import PRIOR_TRIALS, WRONG, Growing
from drafters.control.policy import Run

PRIOR = 1.0 - WRONG  # of the first position
MEMORY = 1000.0  # trials of the first position that are remembered: 1.5% standard error


class Acceptance:
    """Acceptance by position, and the tokens that a step makes at each K.

    By position: conditional, given that it was drafted and all before it accepted. Only drafts
    that were verified count as trials, so a K that varies does not bias the rates (a share of
    all steps would fall whenever fewer are drafted). A position that was seldom drafted of late
    falls back to what the one before it shows: published heads accept about the same share at
    each position behind the first. All positions forget at the pace of the first one's trials;
    while nothing is drafted nothing is forgotten.

    Tokens of a step do not follow from that, because easy text comes in runs. Many drafts a step
    take a run in one step, few in several, so that steps at a small K lie in easy text more often
    than those at a large one. What a run tells of another K is in how many steps it takes there:
    a step with `made` tokens after `run` others from one rejection on would at K have been
    ceil((run + made) / (K + 1)) - ceil(run / (K + 1)) steps. At the K that made them that is one
    each, so tokens over steps are what was measured; elsewhere on the embedded model within 5%
    (docs/decisions/0007), where the sum over positions is off by 10 to 25%. The token behind the
    last draft hides whether the run went on through it. It did not as often as a draft is rejected;
    the step then began one, and `run` is 0.

    Where drafts grow with a run (docs/decisions/0017) that is counted otherwise (growing.py).
    """

    def __init__(self, k_max: int, *, grows: bool = False) -> None:
        self._hits = [0.0] * k_max
        self._trials = [0.0] * k_max
        # As if there had been runs that nothing but the prior ends.
        self._prior_tokens = PRIOR_TRIALS / (1.0 - PRIOR)
        self._prior_steps = [PRIOR_TRIALS / (1.0 - PRIOR ** (k + 1)) for k in range(k_max + 1)]
        self._tokens = 0.0
        self._steps = [0.0] * (k_max + 1)  # that they would have taken at each K
        self._growing = Growing(k_max) if grows else None
        self._k = 0  # of the last step whose drafts grew

    def observe(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        runs: Sequence[Run],
        k: int = 0,
    ) -> None:
        """One step's verification, the first three as in `Step`; the first two of any length. `k`:
        what K was when its drafts were asked for, where they grew; else 0."""
        if not drafted or not drafted[0]:
            return
        keep = max(0.0, 1.0 - drafted[0] / MEMORY)
        self._observe_positions(drafted, accepted, keep)
        self._tokens = keep * self._tokens + sum(run.made for run in runs)
        if self._growing is not None:
            self._growing.observe(runs, k, keep)
            self._steps, self._k = self._growing.steps, k
            return
        hits = PRIOR * PRIOR_TRIALS + sum(self._hits)
        ends = 1.0 - hits / (PRIOR_TRIALS + sum(self._trials))
        steps = [keep * taken for taken in self._steps]
        size = len(steps)
        for run, count in Counter(runs).items():
            through, alone = _steps_of(run.before, run.made, size), _steps_of(0, run.made, size)
            on, anew = (1.0 - ends) * count, ends * count
            steps = [s + on * a + anew * b for s, a, b in zip(steps, through, alone, strict=True)]
        self._steps = steps

    def _observe_positions(
        self, drafted: Sequence[int], accepted: Sequence[int], keep: float
    ) -> None:
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
            expected = min(1.0, (hits + PRIOR_TRIALS * expected) / (trials + PRIOR_TRIALS))
            rates.append(expected)
        return rates

    def survival(self) -> list[float]:
        """Share of steps whose drafts are accepted up to each position: [k_max]."""
        return list(accumulate(self.conditional(), lambda reached, rate: reached * rate))

    def tokens(self) -> list[float]:
        """Expected tokens of a step, its own one included, after K drafts: [k_max + 1]."""
        made = self._prior_tokens + self._tokens
        parts = zip(self._steps, self._prior_steps, strict=True)
        each = [made / (steps + prior) for steps, prior in parts]
        in_force, found, most, size = each[self._k], [], 1.0, len(each)
        for k, tokens in enumerate(each):
            # Runs whose beginning is forgotten may seem to take fewer steps than they can.
            limit = size if self._growing is not None and k else k + 1
            if k < self._k:  # no smaller K makes more
                tokens = min(tokens, in_force)
            most = min(limit, max(most, tokens))
            found.append(most)
        return found

    def grown(self) -> list[float]:
        """Expected of a step at each K: drafts of a request that are asked for beyond K."""
        if self._growing is None:
            return [0.0] * len(self._steps)
        parts = zip(self._growing.drafts, self._steps, self._prior_steps, strict=True)
        return [more / (steps + prior) for more, steps, prior in parts]

    @property
    def trials(self) -> list[float]:
        """Remembered trials of each position: the weight behind its rate."""
        return list(self._trials)


@lru_cache(maxsize=4096)
def _steps_of(run: int, made: int, size: int) -> tuple[int, ...]:
    """Steps that `made` tokens take at each K, `run` tokens into a run: [size]."""
    return tuple(-(-(run + made) // period) + -run // period for period in range(1, size + 1))
