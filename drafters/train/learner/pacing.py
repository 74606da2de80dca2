"""When a learner beside a gateway may compute."""

from __future__ import annotations

from typing import Literal

from drafters.learning.load_signal import Activity

When = Literal["idle", "always"]
TICK_S = 0.05  # how often the load is looked at: half of what a stop may take
SETTLED_S = 0.5  # how long the gateway has to be idle before training goes on


class Pacing:
    """Decides at each look at the load whether the learner may compute until the next one.

    It may while the gateway has been idle for SETTLED_S. Under load it may for a share of the time,
    in turns of one tick, so that a share of 0 means never. While an engine starts it may not.
    """

    def __init__(self, when: When = "idle", share: float = 0.0) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share of the time is 0 to 1, not {share}")
        self._when, self._share = when, share
        self._idle_since: float | None = None
        self._looked: float | None = None
        self._earned = 0.0  # seconds of computing, of the time under load

    def may_have_process(self, activity: Activity) -> bool:
        """Whether the learner may have a process that trains, be it stopped. While an engine starts
        it may not: the engine measures how much memory is free, and takes no more later."""
        if activity is not Activity.STARTING or self._when == "always":
            return True
        self._idle_since = None
        return False

    def may_run(self, activity: Activity, now: float) -> bool:
        """Whether to compute from `now`, in seconds of a steady clock, until the next look."""
        if self._when == "always":
            return True
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * TICK_S)
        self._looked = now
        if activity is Activity.IDLE:
            if self._idle_since is None:
                self._idle_since = now
            if now - self._idle_since >= SETTLED_S:
                self._earned = 0.0
                return True
        else:
            self._idle_since = None
        self._earned += self._share * passed
        if self._earned < TICK_S:
            return False
        self._earned -= TICK_S
        return True
