"""Which drafts the drafter itself believes in.

A draft is of use if it and all before it are accepted. Where the drafter's own probabilities of
these, multiplied, leave next to nothing of that, verifying it costs more than it brings
(docs/decisions/0016).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def confident(
    logs: npt.NDArray[np.float32],  # [sum of wants], of the probability of each draft
    wants: npt.NDArray[np.int64],  # [requests], drafts made
    least: float,
) -> npt.NDArray[np.int64]:
    """How many of each request's drafts to offer, `[requests]`: at least its first."""
    owner = np.repeat(np.arange(len(wants)), wants)
    total = np.cumsum(logs, dtype=np.float64)
    before = np.concatenate([[0.0], total])[np.cumsum(wants) - wants]
    sure = total - before[owner] >= math.log(least)
    return np.maximum(np.bincount(owner[sure], minlength=len(wants)), np.minimum(wants, 1))
