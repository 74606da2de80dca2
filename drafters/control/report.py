"""A policy's state for people and programs, and why K is what it is, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafters.control.objective import FIXED, OFF, Objective
from drafters.control.policy import Step

# Where a step's time goes: `control` is `Step.control_seconds`, `other` is scheduling, and what
# lies between engine and worker.
PHASES = ("target", "draft", "control", "other")


class Totals:
    """Only ever grow. Rates and ratios are for whoever reads them twice."""

    def __init__(self, k_max: int) -> None:
        self.steps = [0] * (k_max + 1)  # by K asked of the drafter
        self.drafted = [0] * k_max  # by position, drafts that were verified
        self.accepted = [0] * k_max
        self.tokens = 0
        self.decode_seconds = 0.0
        self.plain_seconds = 0.0  # that the same tokens would have taken without drafts
        self.phases = dict.fromkeys(PHASES, 0.0)  # seconds of all steps

    def add(self, step: Step, plain_seconds: float) -> None:
        """One step that made tokens, or read prompts."""
        self.steps[step.k] += 1
        for i, (drafted, accepted) in enumerate(zip(step.drafted, step.accepted, strict=True)):
            if not drafted:  # nor any behind it
                break
            self.drafted[i] += drafted
            self.accepted[i] += accepted
        self.tokens += step.tokens
        target, draft, control = step.target_seconds, step.draft_seconds, step.control_seconds
        other = max(0.0, step.seconds - target - draft - control)
        for phase, seconds in zip(PHASES, (target, draft, control, other), strict=True):
            self.phases[phase] += seconds
        if step.load.requests:
            self.decode_seconds += step.seconds
            self.plain_seconds += plain_seconds

    def snapshot(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {
            "steps": list(self.steps),
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "tokens": self.tokens,
            "decode_seconds": self.decode_seconds,
            "plain_seconds": self.plain_seconds,
            "phases": dict(self.phases),
        }


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What a policy believes of each K at a load: [k_max + 1] each."""

    requests: int
    seconds: Sequence[float]  # of a step
    tokens: Sequence[float]  # that it makes
    goodput: Sequence[float]  # tokens per second
    steps: Sequence[float]  # that the seconds were measured in
    ages_s: Sequence[float]  # since the last of them


def acceptance_rows(
    conditional: Sequence[float], survival: Sequence[float], trials: Sequence[float]
) -> list[dict[str, float]]:
    """Of a snapshot, by position."""
    return [
        {"position": i + 1, "conditional": rate, "cumulative": share, "trials": count}
        for i, (rate, share, count) in enumerate(zip(conditional, survival, trials, strict=True))
    ]


def cost_rows(beliefs: Beliefs | None) -> list[dict[str, float]]:
    """Of a snapshot, by K; none before any step was measured."""
    if beliefs is None:
        return []
    columns = zip(beliefs.seconds, beliefs.goodput, beliefs.steps, strict=True)
    return [
        {"k": k, "step_seconds": seconds, "tokens_per_second": goodput, "steps_measured": steps}
        for k, (seconds, goodput, steps) in enumerate(columns)
    ]


def why(objective: Objective, k: int, beliefs: Beliefs | None, *, waits: bool = False) -> str:
    """The reason for K in one sentence without a full stop. `waits`: drafts promise more, but not
    yet as much as the drafter must read first."""
    if objective.name == OFF:
        return "off: the objective is off"
    if objective.name == FIXED:
        return f"{_name(objective.k or 0)}: the objective is fixed"
    if beliefs is None:
        return f"{_name(k)}: no step has been measured yet"
    if len(beliefs.seconds) == 1:
        return "off: the largest K is 0"
    drafting = k or max(range(1, len(beliefs.goodput)), key=beliefs.goodput.__getitem__)
    longer = beliefs.seconds[drafting] / beliefs.seconds[0]
    more = beliefs.tokens[drafting] / beliefs.tokens[0]
    load = f"at {beliefs.requests} request{'s' * (beliefs.requests != 1)}"
    text = (
        f"{_name(k)}: {load} a step with {_drafts(drafting)} takes {longer:.1f} times as long"
        f" and makes {more:.1f} times the tokens, "
    )
    other = 0 if k else drafting
    count, subject = round(beliefs.steps[other]), "" if other else "without drafts "
    if count:
        steps = f"{count} step{'s' * (count != 1)}"
        text += f"{subject}measured in {steps}, the last {_ago(beliefs.ages_s[other])}"
    else:
        text += f"{subject}estimated from other loads"
    if waits:
        text += "; drafts start once they are sure to pay for what the drafter must read first"
    return text


def _name(k: int) -> str:
    return _drafts(k) if k else "off"


def _drafts(k: int) -> str:
    return f"{k} draft{'s' * (k != 1)}"


def _ago(seconds: float) -> str:
    for size, unit in ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second")):
        if seconds >= size:
            count = round(seconds / size)
            return f"{count} {unit}{'s' * (count != 1)} ago"
    return "just now"
