"""Probes: a few steps with another K, and what they may lose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafters.control.policy import Step
from drafters.control.predictions import Predictions
from drafters.control.tuning import Tuning

PLAIN, DRAFT, DEEPER, SHALLOWER = "plain", "draft", "deeper", "shallower"  # kinds of probe


@dataclass(slots=True)
class Probe:
    """A few steps with another K, and the step behind them: it verifies their last drafts, or
    drafts anew behind K = 0."""

    k: int
    steps_to_choose: int  # steady steps that `choose` still has to give its K
    steps_before: int  # chosen before the probe, and not observed yet
    steps_to_charge: int = 1  # chosen at its K and not observed yet, and the one behind them
    lost_tokens: float = 0.0  # to what the K in force would have made; below 0 where it gained

    @property
    def has_ended(self) -> bool:
        """Whether every step of the probe is chosen and charged."""
        return self.steps_to_choose == 0 and self.steps_to_charge == 0


def k_to_probe(
    predictions: Predictions,
    k_in_force: int,
    tuning: Tuning,
    *,
    step_noise: float,
    drafter_may_draft: bool,
    others_may_draft: bool,
) -> int | None:
    """The K to probe, or None.

    K = 0 comes first, without drafts of any source, if its cost is less certain than a probe
    would make it: the speed-up is measured against it. Otherwise the K with the highest
    optimistic value, if that is above the value of the K in force. `step_noise` is the variance of
    a step around its cost (`CostTable.noise`), `drafter_may_draft` whether the source whose K is
    chosen may draft, `others_may_draft` whether another one may. Where no request may have a draft,
    all K are alike and there is nothing to probe.
    """
    by_k, load = predictions.by_k, predictions.load
    if not load.requests_drafted_at(0):
        return None
    probed_variance = step_noise / tuning.probe_steps
    if (k_in_force or others_may_draft) and by_k[0].variance > probed_variance:
        return 0
    if not drafter_may_draft:
        return None
    counts = {load.draft_tokens_at(k_in_force)}  # where limits make two K alike, one is enough
    others = []
    for k in by_k:
        if (count := load.draft_tokens_at(k)) not in counts:
            counts.add(count)
            others.append(k)
    if not others:
        return None
    best = max(others, key=lambda k: by_k[k].optimistic_value)
    return best if by_k[best].optimistic_value > by_k[k_in_force].value else None


def probe_seconds(predictions: Predictions, k: int) -> float:
    """Seconds of a steady step of a probe of K = `k`: at least those estimated for K = 0.

    At K > 0 they are divided by how many times as good the K may be, in cost and acceptance
    together: an estimate that is too bad must not forbid the probe that would correct it.
    """
    by_k = predictions.by_k
    return max(by_k[k].seconds / by_k[k].times_as_good, by_k[0].seconds)


def steps_of_probe(predictions: Predictions, k: int, tuning: Tuning) -> float:
    """Steps that a probe of K = `k` takes: its steady steps, and before them one that makes the
    first drafts, or at K = 0 those that are slow after drafts."""
    if k:
        return tuning.probe_steps + 1.0
    return tuning.probe_steps + tuning.settling_s / probe_seconds(predictions, k)


def probe_loss_seconds(
    predictions: Predictions, k: int, tokens_per_second: float, catch_up_s: float, tuning: Tuning
) -> float:
    """Seconds that a probe of K = `k` is expected to lose to the K in force, which makes
    `tokens_per_second`. `catch_up_s` is how long the drafter must read before it can draft, and
    counts with its uncertainty in favour of the probe."""
    each_s = probe_seconds(predictions, k) - predictions.by_k[k].tokens / tokens_per_second
    lost = max(0.0, steps_of_probe(predictions, k, tuning) * each_s)
    return lost + catch_up_s * math.exp(-tuning.optimism * tuning.read_cost_deviation)


class ProbeBudget:
    """The tokens that probes may lose: a share of the tokens made in the last minute or so, and
    what a probe of K = 0 loses each minute."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.allowance_tokens = 0.0  # below 0: probes have lost more than they may, a debt
        self.lost_tokens = 0.0  # over all ended probes
        self.lost_seconds = 0.0
        self.count_by_kind = dict.fromkeys((DRAFT, PLAIN, DEEPER, SHALLOWER), 0)
        self._plain_began_s = 0.0  # busy seconds of the engine when a probe of K = 0 last began

    def earn(self, step: Step) -> None:
        """Add a step's share to the allowance. What was saved fades; a debt does not."""
        if self.allowance_tokens > 0.0:
            self.allowance_tokens *= math.exp(-step.seconds / self._tuning.allowance_s)
        self.allowance_tokens += self._tuning.probe_share * step.tokens

    def allows(self, k: int, loss_tokens: float, busy_s: float) -> bool:
        """Whether a probe of K may begin that is expected to lose `loss_tokens`, when the engine
        has been busy for `busy_s` seconds.

        One of K = 0 may begin each minute whatever was lost. Else, after probes beside a busy
        process have made a debt, the speed-up would go on being measured against steps that this
        process slowed.
        """
        if k == 0 and busy_s - self._plain_began_s >= self._tuning.plain_probe_s:
            return True
        return self.allowance_tokens >= loss_tokens

    def begin(self, k: int, k_in_force: int, busy_s: float, steps_before: int) -> Probe:
        """Count and return a new probe of K, begun while `steps_before` steps were not observed. A
        step that drafts for the first time verifies nothing, so that a probe with drafts takes one
        step more."""
        self.count_by_kind[_kind(k, k_in_force)] += 1
        if k == 0:
            self._plain_began_s = busy_s
        return Probe(k, self._tuning.probe_steps + (k > 0), steps_before)

    def charge(self, probe: Probe, tokens: float) -> None:
        """Take what a step of a probe lost from the allowance; below 0 it gained."""
        probe.steps_to_charge -= 1
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
