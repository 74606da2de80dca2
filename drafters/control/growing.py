"""What drafts that grow with runs would make of the same text at each K."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

PRIOR = 0.3  # of a draft to be wrong
PRIOR_TRIALS = 16.0


class Growing:
    """Steps at each K, and their drafts, where a step asks for min(k_max, K + run) after `run`
    tokens of a run (docs/decisions/0017): [k_max + 1] each.

    A run is cut by drafts that are wrong, and these are taken to lie in the text, whatever K is.
    The token behind the last draft is the target's own, so a draft that would have been wrong there
    goes unseen. At the K in force that is allowed for by how often those before and after it are
    wrong. At another it falls on other tokens: where one ends a run of just K + 1, the step after
    it is asked for K + 1 more, as if it had gone on.
    """

    def __init__(self, k_max: int) -> None:
        self._k_max = k_max
        self.steps = [0.0] * (k_max + 1)
        self.drafts = [0.0] * (k_max + 1)  # beyond K
        # By tokens of the run before: drafts that were verified, and those that were wrong.
        self._tried = [0.0] * (2 * k_max + 2)
        self._wrong = [0.0] * (2 * k_max + 2)
        self._cut = [0.0] * (k_max + 2)  # [n]: runs of n tokens
        self._runs = 0.0  # of any length

    def observe(self, runs: Sequence[tuple[int, int]], k: int, keep: float) -> None:
        """As in `Acceptance`, of which a share of `keep` is remembered."""
        counted = Counter(runs)
        known = keep * self.steps[k], keep * self.drafts[k]
        shares = [n / (self._runs + PRIOR_TRIALS) for n in self._cut[1:]]  # [K]: of K + 1 tokens
        for kept in (self._tried, self._wrong, self._cut, self.steps, self.drafts):
            kept[:] = [keep * x for x in kept]
        self._runs *= keep
        for (run, made), count in counted.items():
            unseen = self._unseen(run) if run else 0.0
            self._add(run, made, count * (1.0 - unseen), shares)
            if unseen:
                self._add(0, made, count * unseen, shares)
            if k:
                self._try(run, made, min(self._k_max, k + run), count, unseen)
        if k:  # one step each, whatever a run's last token hides
            self.steps[k] = known[0] + len(runs)
            asked = (count * min(self._k_max - k, run) for (run, _), count in counted.items())
            self.drafts[k] = known[1] + sum(asked)

    def _add(self, run: int, made: int, weight: float, shares: Sequence[float]) -> None:
        """Such a step, so many times."""
        size = self._k_max + 1
        alone, after = _steps(run, made, size, False), _steps(run, made, size, True)
        for sums, one, other in zip((self.steps, self.drafts), alone, after, strict=True):
            parts = zip(sums, one, other, shares, strict=True)
            sums[:] = [n + weight * (a + share * (b - a)) for n, a, b, share in parts]

    def _try(self, run: int, made: int, asked: int, count: int, unseen: float) -> None:
        most = len(self._tried) - 1
        for age in range(run, run + min(made, asked)):
            self._tried[min(age, most)] += count
        if unseen:
            self._end(run, count * unseen)
        if made <= asked:
            self._wrong[min(run + made - 1, most)] += count
            self._end(run + made, count)

    def _end(self, tokens: int, count: float) -> None:
        self._runs += count
        if tokens < len(self._cut):
            self._cut[tokens] += count

    def _unseen(self, run: int) -> float:
        """How likely the last token of so many hid a wrong draft."""
        last = len(self._tried) - 1
        ages = (min(max(0, run - 2), last), min(run, last))
        tried = sum(self._tried[age] for age in ages)
        wrong = sum(self._wrong[age] for age in ages)
        return (wrong + PRIOR * PRIOR_TRIALS) / (tried + PRIOR_TRIALS)


@lru_cache(maxsize=8192)
def _steps(
    run: int, made: int, size: int, goes_on: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Steps that `made` tokens take at each K, `run` tokens into a run, and the drafts beyond K
    that these ask for: [size] each. `goes_on`: with K + 1 tokens before that count as of the run.
    """
    over = max(0, run // size - 2)  # by then every step asks for the most
    first, last = run - over * size, run - over * size + made
    steps, drafts = [made], [0]
    for k in range(1, size):
        before = k + 1 if goes_on else 0
        begin = taken = more = 0
        while begin < last:
            beyond = min(size - 1 - k, before + begin)
            if begin >= first:
                taken += 1
                more += beyond
            begin += k + beyond + 1
        steps.append(taken)
        drafts.append(more)
    return tuple(steps), tuple(drafts)
