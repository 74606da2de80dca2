"""What drafts that grow with runs would make of the same text at each K."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from drafters.control.policy import Run

WRONG = 0.3  # of first drafts: between the published heads' worst workload and their best
PRIOR_TRIALS = 16.0  # it takes so many to outweigh what was expected


class Growing:
    """Steps at each K, and their drafts, where a step asks for min(k_max, K + run) after `run`
    tokens of a run (docs/decisions/0017): [k_max + 1] each.

    A run is cut by drafts that are wrong, and these are taken to lie in the text, whatever K is.
    The token behind the last draft is the target's own, so a draft that would have been wrong there
    goes unseen. At the K in force that is allowed for by how often those before and after it are
    wrong. At another it falls on other tokens: where one ends a run of just K + 1, the step after
    it is asked for K + 1 more, as if it had gone on.

    What became of a draft that was left out, all before it accepted, nobody knows. At a smaller K
    that makes one of that token nearer to where its pass begins, it is taken to be right as often
    as first drafts behind such a place are if it is the first, never if it is no nearer, and in
    between in proportion. (These tell how easy the text is there: behind rejections at the same
    depth as many are right, bench/LOG.md of 2026-11-25.)
    """

    def __init__(self, k_max: int) -> None:
        self._k_max = k_max
        self.steps = [0.0] * (k_max + 1)
        self.drafts = [0.0] * (k_max + 1)  # beyond K
        # By tokens of the run before: drafts that were verified, and those that were wrong.
        self._tried = [0.0] * (2 * k_max + 2)
        self._wrong = [0.0] * (2 * k_max + 2)
        self._ended = [0.0] * (k_max + 2)  # [n]: runs of n tokens
        self._runs = 0.0  # of any length
        self._behind = self._right = 0.0  # first drafts behind one that was left out

    def observe(self, runs: Sequence[Run], k: int, keep: float) -> None:
        """As in `Acceptance`, of which a share of `keep` is remembered."""
        counted, size = Counter(runs), self._k_max + 1
        known = keep * self.steps[k], keep * self.drafts[k]
        shares = [n / (self._runs + PRIOR_TRIALS) for n in self._ended[1:]]  # [K]: of K + 1 tokens
        right = (self._right + (1.0 - WRONG) * PRIOR_TRIALS) / (self._behind + PRIOR_TRIALS)
        self._forget(keep)
        alone, after, spared = ([0.0] * (2 * size) for _ in range(3))
        for run, count in counted.items():
            unseen = self._unseen(run.before) if run.before else 0.0
            if k:
                self._try(run.before, run.made, min(self._k_max, k + run.before), count, unseen)
            for before, likely in ((run.before, 1.0 - unseen), (0, unseen)):
                if likely:
                    taken, more = _steps(before, run.made, size)
                    _add(alone, count * likely, taken)
                    _add(after, count * likely, more)
            if run.left_out_after:
                _add(spared, count * (1.0 - unseen), _spared(run, size))
                if not run.before:
                    self._behind += count
                    self._right += count * (run.made > 1)
        for other, share in enumerate(shares):
            for kept, i in ((self.steps, other), (self.drafts, size + other)):
                kept[other] = keep * kept[other] + alone[i] + share * after[i]
                if other < k:
                    kept[other] += (1.0 - share) * right * spared[i]  # not what has gone on already
        if k:  # one step each, whatever a run's last token hides
            self.steps[k] = known[0] + len(runs)
            asked = (count * min(self._k_max - k, run.before) for run, count in counted.items())
            self.drafts[k] = known[1] + sum(asked)

    def _forget(self, keep: float) -> None:
        for kept in (self._tried, self._wrong, self._ended):
            kept[:] = [keep * x for x in kept]
        self._runs, self._behind, self._right = (
            keep * n for n in (self._runs, self._behind, self._right)
        )

    def _try(self, before: int, made: int, asked: int, count: int, unseen: float) -> None:
        most = len(self._tried) - 1
        for age in range(before, before + min(made, asked)):
            self._tried[min(age, most)] += count
        if unseen:
            self._end(before, count * unseen)
        if made <= asked:
            self._wrong[min(before + made - 1, most)] += count
            self._end(before + made, count)

    def _end(self, tokens: int, count: float) -> None:
        self._runs += count
        if tokens < len(self._ended):
            self._ended[tokens] += count

    def _unseen(self, run: int) -> float:
        """How likely the last token of so many hid a wrong draft."""
        last = len(self._tried) - 1
        ages = (min(max(0, run - 2), last), min(run, last))
        tried = sum(self._tried[age] for age in ages)
        wrong = sum(self._wrong[age] for age in ages)
        return (wrong + WRONG * PRIOR_TRIALS) / (tried + PRIOR_TRIALS)


def _add(totals: list[float], weight: float, part: Sequence[float]) -> None:
    totals[:] = [total + weight * x for total, x in zip(totals, part, strict=True)]


@lru_cache(maxsize=8192)
def _steps(run: int, made: int, size: int) -> tuple[list[int], list[int]]:
    """What `made` tokens take at each K, `run` tokens into a run: steps, and the drafts beyond K
    that these ask for; and by how much both differ where K + 1 tokens before it count as of the
    run. [2 * size] each.
    """
    alone, after = _walk(run, made, size, False), _walk(run, made, size, True)
    return alone, [b - a for a, b in zip(alone, after, strict=True)]


@lru_cache(maxsize=8192)
def _spared(run: Run, size: int) -> tuple[float, ...]:
    """By how much both differ at each K if the run goes on from the draft that was left out, as
    likely as that is where first drafts are right."""
    anew = _walk(run.before, run.made, size, False)
    through = _walk(run.left_out_after + run.before, run.made, size, False)
    likely = 2 * _nearer(run.left_out_after, run.position, size)
    return tuple(share * (b - a) for a, b, share in zip(anew, through, likely, strict=True))


def _walk(run: int, made: int, size: int, goes_on: bool) -> list[int]:
    over = _full(run, size)
    first, last = run - over, run - over + made
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
    return steps + drafts


def _nearer(place: int, position: int, size: int) -> list[float]:
    """How much nearer to where its pass begins each K has the draft that is so many tokens from a
    run's beginning than at `position`, from 0 to 1, which is the first one's share: [size]. 1 where
    the token is the target's own as well."""
    place -= _full(place, size)
    shares = [0.0]
    for k in range(1, size):
        begin, tokens = 0, min(size, k + 1)
        while begin + tokens < place:
            begin += tokens
            tokens = min(size, k + 1 + begin)
        at = place - begin
        shares.append(1.0 if at == tokens else max(0, position - at) / max(1, position - 1))
    return shares


def _full(tokens: int, size: int) -> int:
    """Of so many tokens of a run those of whole passes that ask for the most, about the last two
    not among them: where they lie in a pass does not depend on these."""
    return size * max(0, tokens // size - 2)
