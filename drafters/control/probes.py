"""Probes: trials of another K for a few steps, and what they may lose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafters.control.policy import Step
from drafters.control.tuning import Tuning

PLAIN, DRAFT, DEEPER, SHALLOWER = "plain", "draft", "deeper", "shallower"  # kinds of probe


@dataclass(slots=True)
class Probe:
    """A trial of another K for a few steps."""

    k: int
    steps_to_choose: int  # steps that `choose` still has to give its K
    observed: bool = False  # whether a step at its K has been observed
    lost_tokens: float = 0.0  # to what the K in force would have made; below 0 where it gained


class ProbeBudget:
    """The tokens that probes may lose: a share of the tokens made in the last minute or so."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.allowance_tokens = 0.0  # below 0: probes have lost more than they may, a debt
        self.lost_tokens = 0.0  # over all ended probes
        self.lost_seconds = 0.0
        self.count_by_kind = dict.fromkeys((DRAFT, PLAIN, DEEPER, SHALLOWER), 0)

    def earn(self, step: Step) -> None:
        """Add a step's share to the allowance. What was saved fades; a debt does not."""
        if self.allowance_tokens > 0.0:
            self.allowance_tokens *= math.exp(-step.seconds / self._tuning.allowance_s)
        self.allowance_tokens += self._tuning.probe_share * step.tokens

    def begin(self, k: int, k_in_force: int) -> Probe:
        """Count and return a new probe of K. A step that drafts for the first time verifies
        nothing, so that a probe with drafts takes one step more."""
        self.count_by_kind[_kind(k, k_in_force)] += 1
        steps = self._tuning.probe_steps
        return Probe(k, steps + 1 if k else steps)

    def charge(self, probe: Probe, tokens: float) -> None:
        """Take what a step of a probe lost from the allowance; below 0 it gained."""
        probe.lost_tokens += tokens
        self.allowance_tokens -= tokens

    def end(self, probe: Probe, tokens_per_second: float) -> None:
        """Count what a probe lost, in tokens and at the rate of the K in force in seconds."""
        lost = max(0.0, probe.lost_tokens)
        self.lost_tokens += lost
        self.lost_seconds += lost / tokens_per_second


def _kind(k: int, k_in_force: int) -> str:
    if k == 0:
        return PLAIN
    if k_in_force == 0:
        return DRAFT
    return DEEPER if k > k_in_force else SHALLOWER
