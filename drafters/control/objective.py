"""What the choice of K is to achieve, as one value that checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from drafters.config import TPOT_BOUNDS_S

THROUGHPUT, LATENCY, FIXED, OFF = "throughput", "latency", "fixed", "off"
OBJECTIVES = (THROUGHPUT, LATENCY, FIXED, OFF)


class ObjectiveError(ValueError):
    """An objective that makes no sense. `field` names what is wrong: objective, k or tpot_s."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Objective:
    """`k` belongs to `fixed` alone and `tpot_s` (seconds per token) to `latency` alone."""

    name: str = THROUGHPUT
    k: int | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise ObjectiveError("objective", f"must be one of {known}, not {self.name!r}")
        for field, owner in (("k", FIXED), ("tpot_s", LATENCY)):
            value = getattr(self, field)
            if value is not None and self.name != owner:
                raise ObjectiveError(field, f"is for the objective {owner!r}, not {self.name!r}")
            if value is None and self.name == owner:
                raise ObjectiveError(field, f"is needed for the objective {owner!r}")
        least, most = TPOT_BOUNDS_S
        if self.tpot_s is not None and not least <= self.tpot_s <= most:
            problem = f"must be from {least:g} to {most:g} seconds, not {self.tpot_s!r}"
            raise ObjectiveError("tpot_s", problem)

    @property
    def adapts(self) -> bool:
        """Whether K follows the load."""
        return self.name in (THROUGHPUT, LATENCY)

    def changed(
        self, k_max: int, objective: str | None = None, k: int | None = None,
        tpot_s: float | None = None,
    ) -> Self:  # fmt: skip
        """This objective with some of it replaced; `k` and `tpot_s` stay while the name does.

        Raises ObjectiveError.
        """
        name = self.name if objective is None else objective
        same = name == self.name
        made = type(self)(
            name,
            self.k if k is None and same else k,
            self.tpot_s if tpot_s is None and same else tpot_s,
        )
        pinned = made.k
        if pinned is not None and (type(pinned) is not int or not 0 <= pinned <= k_max):
            raise ObjectiveError("k", f"must be a whole number from 0 to {k_max}, not {pinned!r}")
        return made
