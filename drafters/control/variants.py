"""Policies to compare: the full one, the full one without each of its mechanisms, the small one.

For measurements alone. `DRAFTERS_POLICY` in the engine's environment names the policy to serve
with; `turns` lets one engine serve with any of them in turn, by PATCH of the objective
`policy:NAME`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from drafters.control.acceptance import Acceptance
from drafters.control.controller import Controller
from drafters.control.cost import Cell
from drafters.control.forecast import Forecast
from drafters.control.objective import LATENCY, THROUGHPUT, ObjectiveError
from drafters.control.policy import Load, SteerablePolicy, Step
from drafters.control.price import Price
from drafters.control.probing import KINDS
from drafters.control.row import Row
from drafters.control.small.controller import Controller as SmallController

VARIABLE = "DRAFTERS_POLICY"
FULL, SMALL, TURNS = "full", "small", "turns"
PREFIX = "policy:"  # of the objective that gives a policy its turn
_SUMMED = ("switches", "probes", "probe_seconds", "probe_tokens", "busy_seconds", "totals")


class _PositionAcceptance(Acceptance):
    """Tokens of a step as the sum over positions, whatever runs say."""

    def tokens(self) -> list[float]:
        made = [1.0]
        for share in self.survival():
            made.append(made[-1] + share)
        return made


class _MeanRow(Row):
    """Each K's mean over its last 200 steps, at whatever pace they ran."""

    def __init__(self, k_max: int, now: float) -> None:
        super().__init__(k_max, now)
        self._weights = [0.0] * (k_max + 1)

    def calibrate(self, k: int, ratio: float, steps: float) -> None:
        self._mean[k], self._weights[k] = ratio, steps

    def learn(self, k: int, ratio: float, seconds: float, now: float) -> None:
        self._weights[k] = min(200.0, self._weights[k] + 1.0)
        self._mean[k] += (min(ratio, self._mean[k] + 0.4) - self._mean[k]) / self._weights[k]


class _DriftlessRow(Row):
    """The machine's pace always returns to one mean."""

    def _age(self, elapsed: float, seconds: float) -> None:
        super()._age(elapsed, seconds)
        self._covariance[-2] = [0.0] * len(self._covariance)
        for row in self._covariance:
            row[-2] = 0.0


class _Free(Price):
    """Nothing costs anything."""

    @property
    def seconds(self) -> float:
        return 0.0


class _ImpatientForecast(Forecast):
    """Drafts begin as soon as they promise more."""

    def catching_up(self, load: Load, gap: float) -> float:
        return 0.0


class _Reduced(Controller):
    """The full policy without one mechanism."""

    def __init__(self, missing: str, *args: Any, **options: Any) -> None:
        self._missing = missing
        if missing in ("growth", "runs"):
            options["grows"] = False
        super().__init__(*args, **options)
        if missing.startswith("probe-"):
            self._probing._due[missing.removeprefix("probe-")] = math.inf

    @property
    def doubts(self) -> bool:
        return super().doubts and self._missing != "confidence"

    def begin_with(self, cells: Iterable[Cell]) -> None:
        super().begin_with(() if self._missing == "calibration" else cells)
        forecast, costs = self._forecast, self._forecast.costs
        if self._missing == "runs":
            forecast._acceptance = _PositionAcceptance(self.k_max)
        elif self._missing in ("row-filter", "drift"):
            costs.row_type = _MeanRow if self._missing == "row-filter" else _DriftlessRow
            costs._rows.clear()
            costs.load(costs.cells()) if costs.measured else None
        elif self._missing == "prices":
            forecast._prefill, forecast._catch_up, forecast._entering = _Free(), _Free(), _Free()
        elif self._missing == "break-even":
            forecast.__class__ = _ImpatientForecast


MECHANISMS = (
    *("growth", "confidence", "runs", *(f"probe-{kind}" for kind in KINDS)),
    *("row-filter", "prices", "drift", "break-even", "calibration"),
)
NAMES = (FULL, SMALL, *(f"without-{mechanism}" for mechanism in MECHANISMS))


def policy(
    name: str, k_max: int, *, rng: Random, catch_up_tokens: int, grows: bool = False
) -> SteerablePolicy:
    """A policy by name, for throughput. ValueError for an unknown one."""
    if name == TURNS:
        return Turns(
            lambda one: policy(
                one, k_max, rng=Random(0), catch_up_tokens=catch_up_tokens, grows=grows
            )
        )
    if name == SMALL:
        return SmallController(k_max, catch_up_tokens=catch_up_tokens)
    options = {"rng": rng, "catch_up_tokens": catch_up_tokens, "grows": grows}
    if name == FULL:
        return Controller(k_max, **options)  # type: ignore[arg-type]
    mechanism = name.removeprefix("without-")
    if mechanism == name or mechanism not in MECHANISMS:
        raise ValueError(f"no policy {name!r}: {', '.join((*NAMES, TURNS))}")
    return _Reduced(mechanism, k_max, **options)


class Turns:
    """One policy at a time, each with what it has learned in its own turns.

    A pinned K has a policy of its own, so that none learns from its steps.
    """

    def __init__(self, make: Callable[[str], SteerablePolicy]) -> None:
        self._make = make
        self._cells: tuple[Cell, ...] = ()
        self._policies: dict[str, SteerablePolicy] = {}
        self._name = FULL
        self._active = self._policy(FULL)

    def _policy(self, name: str) -> SteerablePolicy:
        if name not in self._policies:
            made = self._policies[name] = self._make(SMALL if name == "pinned" else name)
            made.begin_with(self._cells)
        return self._policies[name]

    @property
    def k_max(self) -> int:
        """The most tokens that may be drafted."""
        return self._active.k_max

    @property
    def most(self) -> int:
        """As the policy whose turn it is."""
        return self._active.most

    @property
    def doubts(self) -> bool:
        """As the policy whose turn it is."""
        return self._active.doubts

    @property
    def grows(self) -> bool:
        """As the policy whose turn it is."""
        return self._active.grows

    @property
    def patience(self) -> int:
        """As the policy whose turn it is."""
        return self._active.patience

    def choose(self, load: Load) -> int:
        """As the policy whose turn it is."""
        return self._active.choose(load)

    def observe(self, step: Step) -> None:
        """Only the policy whose turn it is learns."""
        self._active.observe(step)

    def begin_with(self, cells: Iterable[Cell]) -> None:
        """The same calibration for all of them."""
        self._cells = tuple(cells)
        for one in self._policies.values():
            one.begin_with(self._cells)

    def steer(
        self, *, objective: str | None = None, k: int | None = None, tpot_s: float | None = None
    ) -> None:
        """Objective `policy:NAME`: the turn of that policy; any other: of a policy for that."""
        name = objective or ""
        if name.startswith(PREFIX):
            turn = name.removeprefix(PREFIX)
            try:
                chosen = self._policy(turn)
            except ValueError as error:
                raise ObjectiveError("objective", str(error)) from None
            chosen.steer(objective="off")  # what follows is free of waiting, as for a PATCH
            chosen.steer(objective="throughput")
        elif name in (THROUGHPUT, LATENCY):
            turn, chosen = FULL, self._policy(FULL)
            chosen.steer(objective=objective, k=k, tpot_s=tpot_s)
        else:
            turn, chosen = "pinned", self._policy("pinned")
            chosen.steer(objective=objective, k=k, tpot_s=tpot_s)
        self._name, self._active = turn, chosen

    def snapshot(self) -> dict[str, Any]:
        """As the policy whose turn it is; what counters are made of is of all."""
        state = self._active.snapshot()
        for other in self._policies.values():
            if other is not self._active:
                told = other.snapshot()
                state |= {key: _sum(state[key], told[key]) for key in _SUMMED}
        if self._name not in ("pinned", FULL):
            state["objective"] = PREFIX + self._name
        return state


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {key: _sum(value, other[key]) for key, value in one.items()}
    if isinstance(one, list):
        return [_sum(a, b) for a, b in zip(one, other, strict=True)]
    return one + other
