"""The true cost of a simulated engine's step: a roofline, other than the controller's model.

On a machine that others use too, a step takes as many times as long as the pace says.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Hardware:
    """The costs of a machine and model, in seconds. A mixture of experts reads the experts that its
    tokens need, a dense model all of its weights."""

    base: float  # of every step: launches, attention, dense weights
    request: float  # per request: scheduling, sampling, its KV cache
    experts: float  # to read the weights of all experts once; 0 for a dense model
    touched: float  # share of the experts that one token needs
    token: float  # compute per token
    drafter: float  # of every drafter pass
    drafter_token: float  # per token that a drafter pass makes, or reads to catch up
    parallel: bool = True  # one pass for all K drafts (P-EAGLE), or one for each (EAGLE-3)
    context: float = 0.0  # per token in the KV cache

    def target(self, requests: int, tokens: int, context: int = 0) -> float:
        """Seconds of a forward pass over `tokens` of decoding requests and prompts."""
        if tokens == 0:
            return 0.0
        memory = self.experts * (1.0 - (1.0 - self.touched) ** tokens)
        compute = self.token * tokens
        return self.base + self.request * requests + self.context * context + max(memory, compute)

    def draft(self, requests: int, k: int, unseen: int = 0) -> float:
        """Seconds to draft K tokens for each request, and to read `unseen` tokens before that."""
        if k == 0 or requests + unseen == 0:
            return 0.0
        if self.parallel:
            return self.drafter + self.drafter_token * (requests * k + unseen)
        return k * (self.drafter + self.drafter_token * requests) + self.drafter_token * unseen

    def steady(self, requests: int, k: int) -> float:
        """Seconds of a step that verifies K drafts of every request and makes K more."""
        return self.target(requests, requests * (1 + k)) + self.draft(requests, k)

    def rate(self, requests: int, k: int, survival: list[float]) -> float:
        """Expected tokens per second at a fixed K, which a long run approaches."""
        return requests * (1.0 + sum(survival[:k])) / self.steady(requests, k)


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
