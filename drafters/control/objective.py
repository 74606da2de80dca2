"""The objective of the choice of K, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from drafters.config import SOURCES, TPOT_BOUNDS_S

Name = Literal["throughput", "latency", "fixed", "off"]
OBJECTIVES: tuple[Name, ...] = get_args(Name)
THROUGHPUT, LATENCY, FIXED, OFF = OBJECTIVES
_BELONGS_TO: dict[str, Name] = {"k": FIXED, "tpot_s": LATENCY}


class ObjectiveError(ValueError):
    """An invalid objective: the `field` (of Objective) and its `problem`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


@dataclass(frozen=True, slots=True)
class Objective:
    """What K is chosen for: `fixed` has `k`, `latency` has `tpot_s` (s/token), others neither.
    `sources` are those that may draft where K is adaptive; None, or none of them, is all that the
    engine has."""

    objective: Name = THROUGHPUT
    k: int | None = None
    tpot_s: float | None = None
    sources: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            names = ", ".join(OBJECTIVES)
            raise ObjectiveError("objective", f"must be one of {names}, not {self.objective!r}")
        for field, owner in _BELONGS_TO.items():
            if (getattr(self, field) is None) == (self.objective == owner):
                verb = "needs it" if self.objective == owner else "has none"
                raise ObjectiveError(field, f"the objective {self.objective} {verb}")
        if self.k is not None and (type(self.k) is not int or self.k < 0):
            raise ObjectiveError("k", f"must be a whole number, 0 or more, not {self.k!r}")
        least, most = TPOT_BOUNDS_S
        if self.tpot_s is not None and not least <= self.tpot_s <= most:
            problem = f"must be from {least:g} to {most:g} seconds, not {self.tpot_s!r}"
            raise ObjectiveError("tpot_s", problem)
        if self.sources is not None:
            sources = tuple(source for source in SOURCES if source in self.sources)
            if len(sources) != len(self.sources):
                names = ", ".join(SOURCES)
                raise ObjectiveError("sources", f"must be some of {names}, each once")
            object.__setattr__(self, "sources", sources or None)

    @property
    def adapts(self) -> bool:
        """Whether K is adaptive, chosen anew at each step."""
        return self.objective in (THROUGHPUT, LATENCY)

    def values(self, goodput: Sequence[float], tpots: Sequence[float]) -> Sequence[float]:
        """What the choice of K maximises, one value for each K.

        `goodput` is in tokens per second and `tpots` in seconds per token, at the same K. Values
        are the goodput; for `latency` they are 0 where the TPOT is above `tpot_s`. If no K has a
        TPOT that low, values are 1 / TPOT instead.
        """
        if self.tpot_s is None:
            return goodput
        if min(tpots) > self.tpot_s:
            return [1.0 / tpot for tpot in tpots]
        pairs = zip(goodput, tpots, strict=True)
        return [rate if tpot <= self.tpot_s else 0.0 for rate, tpot in pairs]

    def changed(self, changes: dict[str, Any]) -> Self:
        """This objective with some fields replaced. `k` and `tpot_s` stay while the name does, and
        `sources` in any case."""
        new = {name: value for name, value in changes.items() if value is not None}
        same = new.get("objective", self.objective) == self.objective
        old = self.entries() if same else {"sources": self.sources}
        return type(self)(**{**old, **new})

    def validated_for(self, k_max: int, sources: Sequence[str] = SOURCES) -> Self:
        """Return this objective, or raise ObjectiveError if its `k` is above `k_max`, or if it has
        a source that is not among `sources`."""
        if self.k is not None and self.k > k_max:
            raise ObjectiveError("k", f"must be at most {k_max}, not {self.k}")
        if unknown := set(self.sources or ()) - set(sources):
            have = ", ".join(sources)
            raise ObjectiveError("sources", f"the engine has {have}, not {', '.join(unknown)}")
        return self

    def entries(self) -> dict[str, Any]:
        """The fields that are set, for JSON: `Objective(**entries)` is this one."""
        fields = {
            "objective": self.objective, "k": self.k, "tpot_s": self.tpot_s,
            "sources": None if self.sources is None else list(self.sources),
        }  # fmt: skip
        return {name: value for name, value in fields.items() if value is not None}
