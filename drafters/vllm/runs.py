"""Which requests are in easy text just now, so that they are asked for more drafts.

Easy text comes in runs: of drafts behind some that were all accepted nearly all are accepted, of
those behind a rejection few (docs/decisions/0017). So a request is asked for as many drafts beyond
K as its run is long.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Runs:
    """By slot of a request: tokens since its last rejection, while all that it was asked for were
    offered and accepted. The scheduler counts the same (account.py)."""

    def __init__(self, slots: int) -> None:
        self._tokens: Ints = np.zeros(slots, np.int64)
        self._asked: Ints = np.zeros(slots, np.int64)  # drafts, in the last pass

    def verified(self, slots: Ints, offered: Ints, made: Ints) -> Ints:
        """A step's drafts, `[requests]` each, and the tokens that came of it; returns how long each
        request's run is now. One that had no drafts begins anew."""
        whole = (offered > 0) & (offered == self._asked[slots]) & (made == offered + 1)
        self._tokens[slots] = np.where(whole, self._tokens[slots] + made, 0)
        return self._tokens[slots]

    def ask(self, slots: Ints, drafts: Ints) -> None:
        """What the next pass makes of each request, `[requests]`."""
        self._asked[slots] = drafts
