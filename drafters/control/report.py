"""A policy's state for people and programs, and why K is what it is, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from drafters.control.acceptance import Acceptance
from drafters.control.objective import FIXED, OFF, Objective
from drafters.control.policy import Step

# Where a step's time goes. `other`: scheduling, and the way between engine core and worker.
PHASES = ("target", "draft", "control", "other")
Row = Mapping[str, float]


class Totals:
    """Sums over all steps. They only grow, like counters: a reader makes rates and ratios."""

    def __init__(self, k_max: int) -> None:
        self._counts = {
            "steps": [0] * (k_max + 1),  # by K asked of the drafter
            "drafted": [0] * k_max,  # by position, drafts that were verified
            "accepted": [0] * k_max,
        }
        # `plain_seconds`: what the same tokens would have taken without drafts.
        self._sums = dict.fromkeys(("tokens", "decode_seconds", "plain_seconds"), 0.0)
        self._phases = dict.fromkeys(PHASES, 0.0)  # seconds

    def add(self, step: Step, plain_seconds: float) -> None:
        """Count a step that made tokens or read prompts."""
        self._counts["steps"][step.k] += 1
        for name, counts in (("drafted", step.drafted), ("accepted", step.accepted)):
            for i, count in enumerate(counts):
                self._counts[name][i] += count
        self._sums["tokens"] += step.tokens
        parts = [step.target_seconds, step.draft_seconds, step.control_seconds]
        parts.append(max(0.0, step.seconds - sum(parts)))
        for phase, seconds in zip(PHASES, parts, strict=True):
            self._phases[phase] += seconds
        if step.load.requests:
            self._sums["decode_seconds"] += step.seconds
            self._sums["plain_seconds"] += plain_seconds

    def snapshot(self) -> dict[str, Any]:
        """The sums as plain data for JSON."""
        return deepcopy({**self._counts, **self._sums, "phases": self._phases})


def acceptance_rows(acceptance: Acceptance) -> list[Row]:
    """One row for each draft position, from 1."""
    keys, rates = ("position", "conditional", "cumulative", "trials"), acceptance.conditional()
    positions = range(1, len(rates) + 1)
    rows = zip(positions, rates, acceptance.survival(), acceptance.trials, strict=True)
    return [dict(zip(keys, row, strict=True)) for row in rows]


def cost_rows(*columns: Sequence[float]) -> list[Row]:
    """One row for each K, from 0: a step's seconds, tokens and goodput, steps that measured it."""
    keys = ("k", "step_seconds", "step_tokens", "tokens_per_second", "steps_measured")
    rows = zip(range(len(columns[0])), *columns, strict=True)
    return [dict(zip(keys, row, strict=True)) for row in rows]


def why(objective: Objective, k: int, requests: int, costs: Sequence[Row], waits: bool) -> str:
    """The reason for K in one sentence without a full stop. `waits`: drafts promise more, but not
    yet enough for the drafter's catch-up."""
    name = _count(k, "draft") if k else "off"
    if objective.objective in (OFF, FIXED):
        return f"{name}: the objective is {objective.objective}"
    if not costs:
        return f"{name}: no step has been measured yet"
    if len(costs) == 1:
        return "off: the largest K is 0"
    plain, best = costs[0], max(costs[1:], key=lambda row: row["tokens_per_second"])
    drafting = costs[k] if k else best
    longer = drafting["step_seconds"] / plain["step_seconds"]
    more = drafting["step_tokens"] / plain["step_tokens"]
    other, subject = (plain, "without drafts ") if k else (drafting, "")
    steps, drafts = _count(other["steps_measured"], "step"), _count(drafting["k"], "draft")
    return (
        f"{name}: at {_count(requests, 'request')} a step with {drafts} takes "
        f"{longer:.1f} times as long and makes {more:.1f} times the tokens, {subject}"
        + (f"measured in {steps}" if other["steps_measured"] else "estimated from other loads")
        + "; drafts start once they are sure to pay for what the drafter must read first" * waits
    )


def _count(number: float, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
