"""Acceptance of a draft head in the warm-up, compared with what its model card says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

# As in the alert AcceptanceCollapsed: half of what is stated, or at least what any head reaches
# that fits its target.
SHARE, FLOOR = 0.5, 0.2
# Significance level of the binomial test: the warm-up has a few dozen steps.
CHANCE = 0.01
LENGTH, FIRST = "acceptance length", "1"  # columns of the table of `aerie evaluate`


@dataclass(frozen=True, slots=True)
class FirstDrafts:
    """Counts of the first draft token of each step that verified drafts: all, and accepted ones."""

    verified: int
    accepted: int

    @property
    def ratio(self) -> float:
        """Share of the verified ones that were accepted, 0 if there were none."""
        return self.accepted / self.verified if self.verified else 0.0


def least_expected(drafter: str | None, k: int) -> float:
    """The smallest share of first drafts that an intact head gets accepted."""
    card = Path(drafter or "") / "README.md"
    stated = stated_by(card.read_text("utf-8", "replace"), k) if card.is_file() else None
    return max(FLOOR, SHARE * (stated or 0.0))


def stated_by(card: str, k: int) -> float | None:
    """Share of accepted first drafts that a model card states for K, the lowest of all workloads.

    Read from the table that `aerie evaluate` prints. The nearest K counts where K has no row.
    None if the card has no such table.
    """
    columns: list[str] = []
    stated: dict[int, list[float]] = {}
    for line in card.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if LENGTH in cells and FIRST in cells:
            columns = cells
        elif columns and len(cells) == len(columns):
            row = dict(zip(columns, cells, strict=True))
            if (ratio := _ratio(row[FIRST])) is not None and row.get("K", "").isdigit():
                stated.setdefault(int(row["K"]), []).append(ratio)
    return min(stated[min(stated, key=lambda known: abs(known - k))]) if stated else None


def _ratio(cell: str) -> float | None:
    """`.897 ±.015` -> 0.897."""
    try:
        value = float(cell.split()[0])
    except (IndexError, ValueError):
        return None
    return value if 0 <= value <= 1 else None


def far_below(seen: FirstDrafts, least: float) -> bool:
    """Whether the accepted share is below `least` by more than chance.

    A head whose share is `least` would get so few accepted in less than one of a hundred warm-ups.
    """
    return _at_most(seen.accepted, seen.verified, least) < CHANCE


def _at_most(successes: int, trials: int, probability: float) -> float:
    """Cumulative binomial distribution."""
    return sum(
        math.comb(trials, n) * probability**n * (1 - probability) ** (trials - n)
        for n in range(successes + 1)
    )


def warning(seen: FirstDrafts, least: float, *, head: str | None, target: str) -> str:
    """The warning of an unfit head, as one line for the log."""
    return (
        f"the head {head} had {seen.accepted} of {seen.verified} first drafts accepted in the "
        f"warm-up, at least {least:.0%} are expected: it was made for another model than {target}, "
        "or its weights are damaged; answers stay right, but drafts do not pay"
    )
