"""The parts of a policy's state that are tables: plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from drafters.config import SOURCES
from drafters.control.acceptance import Acceptance
from drafters.control.policy import Step
from drafters.control.predictions import KPrediction

# Where a step's time goes. `other`: scheduling, and the way between engine core and worker.
PHASES = ("target", "draft", "control", "other")
Row = Mapping[str, float]
# What adds up over the copies of an engine (data-parallel). Each chooses its own K, from what it
# has seen itself.
ADDED_UP = (
    *("requests", "waiting", "switches", "probes", "probe_seconds", "probe_tokens"),
    *("busy_seconds", "totals"),
)


class Totals:
    """Sums over all steps. They only grow, like counters: a reader makes rates and ratios."""

    def __init__(self, k_max: int, drafter: str) -> None:
        """`drafter` is the source of which K is chosen."""
        self._drafter = drafter
        self._counts = {
            "steps": [0] * (k_max + 1),  # by K asked of the drafter
            "drafted": [0] * k_max,  # draft tokens of the head that were verified, by position
            "accepted": [0] * k_max,  # of those
        }
        # `plain_seconds`: what the same tokens would have taken without drafts. `decode_seconds`
        # also has the drafter's reading in steps that only read prompts.
        self._sums = dict.fromkeys(("tokens", "decode_seconds", "plain_seconds"), 0.0)
        self._sources = {source: {"drafted": 0, "accepted": 0} for source in SOURCES}  # tokens
        self._phases = dict.fromkeys(PHASES, 0.0)  # seconds

    def add(self, step: Step, decode_seconds: float, plain_seconds: float) -> None:
        """Count a step that made tokens or read prompts."""
        self._counts["steps"][step.k] += 1
        for name, counts in (("drafted", step.drafted), ("accepted", step.accepted)):
            for i, count in enumerate(counts):
                self._counts[name][i] += count
        for source, drafted, accepted in (
            (self._drafter, step.drafted, step.accepted),
            *step.others,
        ):
            self._sources[source]["drafted"] += sum(drafted)
            self._sources[source]["accepted"] += sum(accepted)
        self._sums["tokens"] += step.tokens
        known_seconds = step.target_seconds + step.draft_seconds + step.control_seconds
        self._phases["target"] += step.target_seconds
        self._phases["draft"] += step.draft_seconds
        self._phases["control"] += step.control_seconds
        self._phases["other"] += max(0.0, step.seconds - known_seconds)
        self._sums["decode_seconds"] += decode_seconds
        self._sums["plain_seconds"] += plain_seconds

    def snapshot(self) -> dict[str, Any]:
        """The sums as plain data for JSON."""
        sums = {**self._counts, **self._sums}
        return deepcopy({**sums, "phases": self._phases, "sources": self._sources})


def acceptance_rows(acceptance: Acceptance) -> list[Row]:
    """One row for each draft position, from 1."""
    rates, survival = acceptance.conditional(), acceptance.survival()
    trials = acceptance.observed_trials
    return [
        {
            "position": i + 1,
            "conditional": rates[i],
            "cumulative": survival[i],
            "trials": trials[i],
        }
        for i in range(len(rates))
    ]


def cost_rows(
    predictions: Iterable[KPrediction], steps_measured: Callable[[int], int]
) -> list[Row]:
    """One row for each K that may be chosen. `steps_measured` is how many steps measured a K."""
    return [
        {
            "k": prediction.k,
            "step_seconds": prediction.seconds,
            "step_tokens": prediction.tokens,
            "tokens_per_second": prediction.goodput,
            "steps_measured": steps_measured(prediction.k),
        }
        for prediction in predictions
    ]


def of_all_copies(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of the first copy of an engine, in which the figures of ADDED_UP are sums."""
    first = states[0]
    sums = {name: _sum([state[name] for state in states]) for name in ADDED_UP if name in first}
    return {**first, **sums}


def _sum(values: Sequence[Any]) -> Any:
    """The sum of numbers, or of tables or lists of them of the same shape."""
    if isinstance(values[0], Mapping):
        return {name: _sum([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], Sequence):
        return [_sum(column) for column in zip(*values, strict=True)]
    return sum(values)
