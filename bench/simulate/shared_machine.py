"""How many times as long steps take on a machine that others use too."""

from __future__ import annotations

import math
import random

# The pace of a shared machine wandered from 152 to 90 tokens/s within a minute (bench/LOG.md).
WANDERING = 0.2  # standard deviation of the logarithm of the pace
MEMORY_S = 60.0  # in which it forgets where it was
TICK_S = 0.1
# Beside another process that needs the cores, each step takes 1 to 4 times as long.
QUIET_S, BUSY_S = 100.0, 20.0
BUSY_FACTORS = (1.0, 2.0, 3.0, 4.0)
# The first plain steps after drafts took 1.38, 1.19, 1.15, 1.12 ... 1.03 (15th) times as long as
# later ones (bench/LOG.md).
SLOW_AFTER_DRAFTS = 0.38


class SharedPace:
    """A pace that wanders, and another process that comes for a while every two minutes.

    Where it wanders and when the process comes follow from `seed` and the time alone, whatever
    policy chooses K.
    """

    def __init__(self, seed: int) -> None:
        self._walk = random.Random(f"{seed} pace")
        self._busy = random.Random(f"{seed} busy")
        self._log_paces = [self._walk.gauss(0.0, WANDERING)]  # by tick
        self._begins_s = self._busy.uniform(0.0, QUIET_S)  # of the first busy time

    def __call__(self, second: float) -> float:
        """How many times as long a step takes that begins now."""
        tick = int(second / TICK_S)
        kept = math.exp(-TICK_S / MEMORY_S)
        while len(self._log_paces) <= tick:
            step = self._walk.gauss(0.0, WANDERING * math.sqrt(1.0 - kept**2))
            self._log_paces.append(kept * self._log_paces[-1] + step)
        pace = math.exp(self._log_paces[tick])
        if (second - self._begins_s) % (QUIET_S + BUSY_S) < BUSY_S:
            pace *= self._busy.choice(BUSY_FACTORS)
        return pace
