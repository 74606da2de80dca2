"""How many of the drafts that it is asked for a drafter offers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

PRIOR_TRIALS = 16.0  # how many it takes to outweigh what was seen one position earlier
MEMORY = 1000.0  # requests' drafts that are remembered


class Offers:
    """Where drafters leave out what they doubt (docs/decisions/0016).

    Whether a draft is left out depends on those before it and not on K, so each position has a
    share of its own: of the requests that were offered all drafts before it and asked for it,
    those that were offered it as well. All are 1 at first.
    """

    def __init__(self, k_max: int) -> None:
        self._offered = [0.0] * k_max
        self._asked = [0.0] * k_max

    def observe(self, drafted: Sequence[int], doubted: Sequence[int]) -> None:
        """One step's, as in `Step`."""
        if not doubted or not drafted[0]:
            return
        keep = max(0.0, 1.0 - drafted[0] / MEMORY)
        for i, (offered, left_out) in enumerate(zip(drafted, doubted, strict=True)):
            self._offered[i] = keep * self._offered[i] + offered
            self._asked[i] = keep * self._asked[i] + offered + left_out

    def survival(self) -> list[float]:
        """Share of requests that are offered a draft at each position: [k_max]."""
        shares, expected = [], 1.0
        for offered, asked in zip(self._offered, self._asked, strict=True):
            expected = (offered + PRIOR_TRIALS * expected) / (asked + PRIOR_TRIALS)
            shares.append(expected)
        return list(accumulate(shares, lambda reached, share: reached * share))
