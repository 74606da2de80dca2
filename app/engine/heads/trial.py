"""A trial of a draft head in service: does it make fewer tokens per second than the one in force?

The replay has favoured it already (drafters/train/learner/proof.py), on the same answers for both
heads, which resolves a smaller gain than service does. So the candidate is kept unless service
shows that it is worse. Where the replay compared it with another head than the one in force, such
as one that was pinned then, it says nothing of the two: the candidate is kept only if service shows
that it is better.

The two draft in turn, for periods of equal decoding time under whatever requests come. Two periods
that follow each other, one of each head in an order drawn by chance, are a pair; what counts is the
difference within pairs, so that the machine and the traffic may change. The measure is tokens per
second over those at K = 0, estimated by the policy (`plain_seconds` / `decode_seconds` of its
totals), of which the price of drafts is a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from statistics import mean, stdev
from typing import Any

from drafters.config import HEAD
from drafters.learning.lineage import KEPT, REPLAY, ROLLED_BACK, SERVICE
from drafters.small_samples import CONFIDENCE, student_t


@dataclass(frozen=True)
class TrialPlan:
    """How long a trial lasts, and how sure it has to be."""

    period_s: float = 10.0  # seconds of decoding
    # Seconds of decoding after a swap that count for no head: the policy learns what is accepted.
    settle_s: float = 1.0
    # A period counts if K is above 0 in so many of its steps. At K = 0 only probes draft.
    least_share: float = 0.25
    # A period that counts goes on until so many tokens of the head are verified, or `longest_s` are
    # over: an engine may be slow.
    least_drafted: int = 50
    longest_s: float = 60.0  # seconds of decoding
    # Seconds of decoding in periods that do not count, after which the trial ends.
    undrafted_s: float = 300.0
    # Pairs after which the figures are looked at. At one look or more of all, chance may decide
    # with 5%: each look gets an equal part of that.
    looks: tuple[int, ...] = (4, 8, 16, 32)

    @property
    def confidence(self) -> float:
        """The confidence of the interval at each look."""
        return 1.0 - (1.0 - CONFIDENCE) / len(self.looks)


@dataclass(frozen=True)
class _Sums:
    decode_s: float
    plain_s: float
    steps: int
    drafting_steps: int  # of `steps`: those with K above 0
    drafted: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Sums:
        totals = state["totals"]
        return cls(
            decode_s=totals["decode_seconds"],
            plain_s=totals["plain_seconds"],
            steps=sum(totals["steps"]),
            drafting_steps=sum(totals["steps"][1:]),
            drafted=totals["sources"][HEAD]["drafted"],
        )


class Trial:
    """Periods of a candidate and of the generation in force, until there is a verdict.

    `drafting` is the generation that should draft now. Whoever swaps heads tells `begin` the state
    of the policy after each swap, and `observe` its states from then on.
    """

    def __init__(
        self,
        candidate: int,
        incumbent: int,
        random: Random,
        plan: TrialPlan | None = None,
        *,
        has_replay: bool = True,
    ) -> None:
        """`has_replay` says whether the replay has compared these two heads."""
        self.candidate = candidate
        self.incumbent = incumbent
        self._has_replay = has_replay
        self.plan = plan or TrialPlan()
        self._random = random
        self._pairs: list[tuple[float, float]] = []  # speed-up of the candidate and the incumbent
        self._pair: dict[int, float] = {}  # of the pair under way, by generation
        self._since: _Sums | None = None  # where the period, or the settling before it, began
        self._settled = False
        self._undrafted_s = 0.0  # seconds of decoding in periods that did not count
        self._aim: Any = None  # the policy's objective in this pair
        self.drafting = random.choice((candidate, incumbent))

    def begin(self, state: Mapping[str, Any]) -> None:
        """Begin a period of `drafting` behind a swap."""
        self._since = _Sums.of(state)
        self._settled = False
        self._follow(state)

    def interrupt(self) -> None:
        """Forget the pair under way: the engine is a new one, or another head was in force."""
        self._pair.clear()
        self._since = None

    def observe(self, state: Mapping[str, Any]) -> None:
        """Take in a state of the policy. Where a period has ended, `drafting` is the next one's."""
        if self._since is None:
            self.begin(state)
            return
        self._follow(state)
        now, since = _Sums.of(state), self._since
        decode_s = now.decode_s - since.decode_s
        if decode_s < (self.plan.period_s if self._settled else self.plan.settle_s):
            return
        if not self._settled:
            self._since = now
            self._settled = True
            return
        drafting_steps = now.drafting_steps - since.drafting_steps
        least = max(1.0, self.plan.least_share * (now.steps - since.steps))
        drafts = drafting_steps >= least
        enough = now.drafted - since.drafted >= self.plan.least_drafted
        if drafts and not enough and decode_s < self.plan.longest_s:
            return
        self._since = now
        plain_s = now.plain_s - since.plain_s
        # At K = 0 both heads are alike. That K = 0 is chosen with one head and not with the other
        # says which is better, and counts: the pair began with a head that drafts. The turn passes
        # on in any case.
        if plain_s > 0 and (drafts or self._pair):
            self._pair[self.drafting] = plain_s / decode_s
        else:
            self._undrafted_s += decode_s
        self._next_period()

    def _follow(self, state: Mapping[str, Any]) -> None:
        """Drop the pair under way if somebody has changed what K is chosen for."""
        aim = [state.get(name) for name in ("objective", "tpot_s", "sources")]
        aim.append(state["k"] if state.get("objective") == "fixed" else None)
        if self._aim != aim:
            self._aim = aim
            self._pair.clear()
            self._since = _Sums.of(state)
            self._settled = False

    def _next_period(self) -> None:
        self._settled = False
        if len(self._pair) < 2:
            both = {self.candidate, self.incumbent}
            (self.drafting,) = both - {self.drafting}
            return
        self._pairs.append((self._pair[self.candidate], self._pair[self.incumbent]))
        self._pair.clear()
        self.drafting = self._random.choice((self.candidate, self.incumbent))

    def verdict(self) -> tuple[str, str] | None:
        """KEPT or ROLLED_BACK, and whether SERVICE or the REPLAY has shown it; None while the trial
        goes on. Where it ends and service has shown nothing, the replay has, if there was one."""
        pairs, looks = len(self._pairs), self.plan.looks
        if pairs in looks and not self._pair:
            low, high = self._interval()
            if low > 1.0:
                return KEPT, SERVICE
            if high < 1.0:
                return ROLLED_BACK, SERVICE
            if pairs == looks[-1]:
                return self._undecided()
        return self._undecided() if self._undrafted_s >= self.plan.undrafted_s else None

    def _undecided(self) -> tuple[str, str]:
        """The verdict where service has shown no difference."""
        return (KEPT, REPLAY) if self._has_replay else (ROLLED_BACK, SERVICE)

    def _interval(self) -> tuple[float, float]:
        """The interval of the ratio of tokens per second, candidate to incumbent."""
        logs = [math.log(candidate / incumbent) for candidate, incumbent in self._pairs]
        share = (1.0 + self.plan.confidence) / 2.0
        half = student_t(share, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
        return math.exp(mean(logs) - half), math.exp(mean(logs) + half)

    def figures(self) -> dict[str, Any]:
        """What was seen so far: speed-up over K = 0 of each (means of periods), their ratio and its
        interval, which has `confidence`, and the seconds of periods that did not count."""
        found: dict[str, Any] = {
            "generation": self.candidate,
            "against": self.incumbent,
            "pairs": len(self._pairs),
            "speedup": None,
            "speedup_against": None,
            "ratio": None,
            "interval": None,
            "confidence": round(self.plan.confidence, 4),
            "undrafted_s": round(self._undrafted_s, 1),
        }
        if self._pairs:
            candidates, incumbents = zip(*self._pairs, strict=True)
            logs = [math.log(a / b) for a, b in self._pairs]
            found |= {
                "speedup": mean(candidates),
                "speedup_against": mean(incumbents),
                "ratio": math.exp(mean(logs)),
            }
        if len(self._pairs) > 1:
            found["interval"] = list(self._interval())
        return found
