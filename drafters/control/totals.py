"""Running sums over all steps: what counters are made of."""

from __future__ import annotations

from typing import Any

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
        self.left_out = 0  # drafts that the drafter doubted
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
        self.left_out += step.load.doubted_tokens
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
            "left_out": self.left_out,
            "tokens": self.tokens,
            "decode_seconds": self.decode_seconds,
            "plain_seconds": self.plain_seconds,
            "phases": dict(self.phases),
        }
