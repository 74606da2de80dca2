"""Rare trials of another K, so that nothing the policy relies on goes stale, within a budget."""

from __future__ import annotations

import random
from dataclasses import dataclass

from drafters.control.policy import Load

SHARE = 0.003  # of the tokens made while K adapts may be lost to probes
SAVED = 4096.0  # tokens: the most that is saved up
ADVANCE = 8.0  # tokens that may be lost before any are earned
LONGEST_S = 0.25  # what one probe may be predicted to lose
OF_STAY = 0.01  # and as a share of the time since K last changed: short stays are not for trials
FIRST_S, LAST_S = 1.0, 64.0  # seconds of steps between probes of a kind, doubled if in vain
SURPRISE = 0.05  # a probe that moves what its K promises by this much was not in vain
JITTER = 0.25  # of an interval, so that probes do not fall into step with a periodic load

DRAFT = "draft"  # K > 0 while it is 0
PLAIN, DEEPER, SHALLOWER = "plain", "deeper", "shallower"  # while it is not: 0, more, fewer
KINDS = (DRAFT, PLAIN, DEEPER, SHALLOWER)


@dataclass(slots=True)
class Probe:
    """A trial under way."""

    kind: str
    k: int
    load: Load  # when it began
    rate: float  # tokens per second at the K that it interrupts
    promised: float  # and at its own K, as estimated before
    to_choose: int
    # Then: the step before its last, the last, and the one that verifies the last's drafts.
    to_observe: int = 3
    seen: bool = False  # a step of its own has been observed
    lost: float = 0.0  # seconds, so far


class Probing:
    """When to probe, and what it has cost.

    The bound: at any time, the tokens lost to probes are at most `SHARE` of the tokens made while K
    adapted, plus `ADVANCE`, plus the last probe's excess over what was predicted of it. A probe
    begins only if its predicted loss has been earned; what it really lost is then charged. The
    budget is in tokens because seconds are not alike: one earned with a single request would
    be spent on fifty. Not all of it at once, either: what a probe may lose also grows with
    the time that K has stood, or each burst of a few seconds would pay for one.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._interval = dict.fromkeys(KINDS, FIRST_S)
        self._due = dict.fromkeys(KINDS, FIRST_S)
        self.probes = dict.fromkeys(KINDS, 0)
        self.active: Probe | None = None
        self.busy_seconds = 0.0  # of all steps
        self._changed = 0.0  # busy seconds at the last change of K
        self.lost_seconds = 0.0
        self.lost_tokens = 0.0
        self._balance = ADVANCE

    @property
    def back_off(self) -> dict[str, float]:
        """Busy seconds between probes of each kind, as they are now."""
        return dict(self._interval)

    def earn(self, seconds: float, tokens: int) -> None:
        """A step was observed; of its tokens those that probes may be paid from."""
        self.busy_seconds += seconds
        self._balance = min(SAVED, self._balance + SHARE * tokens)

    def is_due(self, kind: str) -> bool:
        """Whether a probe of this kind would be welcome now."""
        return self.active is None and self.busy_seconds >= self._due[kind]

    def begin(self, probe: Probe, predicted_loss: float) -> bool:
        """Start it if its predicted loss, in seconds, is short and has been earned."""
        allowed = min(LONGEST_S, OF_STAY * (self.busy_seconds - self._changed))
        if predicted_loss > allowed or predicted_loss * probe.rate > self._balance:
            return False
        self.active = probe
        self.probes[probe.kind] += 1
        return True

    def charge(self, k: int, seconds: float, tokens: float) -> Probe | None:
        """A step was observed; the probe under way if this was the last of it."""
        probe = self.active
        if probe is None:
            return None
        probe.seen = probe.seen or k == probe.k
        if probe.seen:
            probe.lost += seconds - tokens / probe.rate
        # Steps before its first are still of the K before, at most one when asynchronous.
        if probe.to_choose > 0:
            return None
        probe.to_observe -= 1
        if probe.to_observe > 0:
            return None
        self._end(probe)
        return probe

    def give_up(self) -> None:
        """End the probe under way, which can tell nothing now; later is time for another."""
        probe = self.active
        if probe is not None:
            self._end(probe)
            self._due[probe.kind] = self.busy_seconds + self._interval[probe.kind]

    def _end(self, probe: Probe) -> None:
        self.active = None
        lost = max(0.0, probe.lost)
        self.lost_seconds += lost
        self.lost_tokens += lost * probe.rate
        self._balance -= lost * probe.rate

    def settle(self, probe: Probe, promised: float) -> None:
        """After a probe, with what its K promises now: back off if that is nothing new."""
        kind, changed = probe.kind, abs(promised / probe.promised - 1.0) > SURPRISE
        self._interval[kind] = FIRST_S if changed else min(LAST_S, 2.0 * self._interval[kind])
        jitter = 1.0 + JITTER * (2.0 * self._rng.random() - 1.0)
        self._due[kind] = self.busy_seconds + self._interval[kind] * jitter

    def renew(self) -> None:
        """K changed: what was learned at the old one is no reason to wait."""
        self._changed = self.busy_seconds
        for kind in KINDS:
            self._interval[kind] = FIRST_S
            self._due[kind] = min(self._due[kind], self.busy_seconds + FIRST_S)
