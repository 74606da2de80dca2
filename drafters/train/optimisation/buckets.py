"""Round tensor sizes up, so that few shapes occur and each of them often.

oneDNN, which multiplies matrices for torch on a CPU, generates code for every shape. If every batch
has shapes of its own, that takes longer than the products themselves: half of the time of an update
with AMX (bench/LOG.md, 2026-11-25).
"""

from __future__ import annotations

_LEAST = 64


def bucket(size: int) -> int:
    """The smallest bucket that holds `size`: a multiple of 64, and from 512 on a multiple of a
    quarter of the power of two below it. On average 9% is added."""
    step = max(_LEAST, 1 << max(size - 1, 1).bit_length() >> 3)
    return -(-size // step) * step
