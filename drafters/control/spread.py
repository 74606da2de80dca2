"""Whose drafts a step's are: requests differ, code drafts well and prose does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

PRIOR_TRIALS = 8.0  # of all requests' acceptance, which a request's own outweighs
OWN_MEMORY = 16.0  # trials; easy and hard text come and go within one answer
MEMORY = 1000.0  # trials, of all requests together
LEAST, MOST = 0.05, 0.95  # acceptance that is taken to be possible
GOLDEN = 0.618034  # multiples of it, without their whole part, fill 0 to 1 evenly


class Spread:
    """Shares out a step's drafts by each request's own recent acceptance, as many as at one K for
    all.

    If drafts are accepted with probability `a` each, given those before, the last of k adds a**k
    tokens. Most come of it where the last draft of every request adds as much, which is where k is
    proportional to 1 / -ln(a): to the length of what the drafter gets right before it errs.
    """

    def __init__(self, k_max: int) -> None:
        self._k_max = k_max
        self._own: dict[str, tuple[float, float]] = {}  # request -> drafts accepted, drafts reached
        self._hits = self._trials = 0.0
        self._offset = 0.0  # of the rounding: another in every step, so that over steps it is fair

    def observe(self, request: str, drafts: int, accepted: int) -> None:
        """What became of a request's drafts in a step."""
        reached = min(drafts, accepted + 1)
        if not reached:
            return
        hits, trials = self._own.get(request, (0.0, 0.0))
        keep = max(0.0, 1.0 - reached / OWN_MEMORY)
        self._own[request] = keep * hits + accepted, keep * trials + reached
        keep = max(0.0, 1.0 - reached / MEMORY)
        self._hits = keep * self._hits + accepted
        self._trials = keep * self._trials + reached

    def keep(self, requests: Set[str]) -> None:
        """All others are over."""
        for request in self._own.keys() - requests:
            del self._own[request]

    def share(self, k: int, requests: Iterable[str]) -> dict[str, int]:
        """Drafts of each request of which some were verified, 0 to `k_max` and on average `k`;
        all others have `k`."""
        weights = {name: self._weight(*self._own[name]) for name in requests if name in self._own}
        shares: dict[str, int] = {}
        left, each = k * len(weights), 0.0
        while weights:
            each = left / sum(weights.values())
            full = [name for name, weight in weights.items() if each * weight >= self._k_max]
            if not full:
                break
            for name in full:
                del weights[name]
                shares[name] = self._k_max
                left -= self._k_max
        self._offset = due = (self._offset + GOLDEN) % 1.0
        for name, weight in weights.items():
            before, due = due, due + each * weight
            shares[name] = int(due) - int(before)
        return shares

    def _weight(self, hits: float, trials: float) -> float:
        common = self._hits / self._trials
        rate = (hits + PRIOR_TRIALS * common) / (trials + PRIOR_TRIALS)
        return -1.0 / math.log(min(MOST, max(LEAST, rate)))
