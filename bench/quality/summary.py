"""The summary of a quality run: equal answers, ties, failures, pass@1."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bench.quality.difference import Difference

SIDES = ("on", "off")  # answers with drafts, and without
_NORMAL_97_5 = 1.959964  # quantile of the normal distribution for an interval of 95%

Cells = Mapping[tuple[Any, ...], Mapping[str, Any]]  # (task_id,) -> the results of one problem


def summary(cells: Cells, tolerance: float) -> dict[str, Any]:
    """Figures of all problems; `failures` counts the differences that are not float ties."""
    differing = [
        {"task_id": key[0], **cell["difference"], "tie": tie}
        for key, cell in cells.items()
        if cell["difference"] is not None
        for tie in [Difference(**cell["difference"]).is_tie(tolerance)]
    ]
    ties = sum(item["tie"] for item in differing)
    found: dict[str, Any] = {
        "problems": len(cells),
        "equal": len(cells) - len(differing),
        "ties": ties,
        "failures": len(differing) - ties,
        "tolerance": tolerance,
        "differing": differing,
        "cut_off": {
            side: sum(cell[side]["finish_reason"] == "length" for cell in cells.values())
            for side in SIDES
        },
    }
    if cells and all("outcome" in cell["on"] for cell in cells.values()):
        found["pass_at_1"] = {side: _pass_at_1(cells, side) for side in SIDES}
        found["passed_once"] = {side: _passed_only(cells, side) for side in SIDES}
    return found


def _pass_at_1(cells: Cells, side: str) -> dict[str, Any]:
    outcomes = Counter(cell[side]["outcome"] for cell in cells.values())
    passed, count = outcomes["passed"], len(cells)
    return {
        "value": round(passed / count, 4),
        "interval": [round(end, 4) for end in wilson(passed, count)],
        "outcomes": dict(sorted(outcomes.items())),
    }


def _passed_only(cells: Cells, side: str) -> int:
    """Problems that passed on this side and not on the other.

    Both answers are to the same problems, so that the two intervals of pass@1 say nothing of the
    difference of the sides: these counts do (McNemar 1947).
    """
    (other,) = (name for name in SIDES if name != side)
    return sum(
        cell[side]["outcome"] == "passed" != cell[other]["outcome"] for cell in cells.values()
    )


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927), which lies within 0 and 1 and is never empty.
    Raises ValueError without trials."""
    if trials < 1:
        raise ValueError("a share needs a trial")
    share, square = successes / trials, _NORMAL_97_5**2 / trials
    centre = share + square / 2
    half = math.sqrt(square * (share * (1 - share) + square / 4))
    low, high = ((centre - half) / (1 + square), (centre + half) / (1 + square))
    return max(0.0, low), min(1.0, high)


def text(found: Mapping[str, Any]) -> str:
    """The summary as text for people."""
    count = found["problems"]
    lines = [
        f"{found['equal']} of {count} answers have the same tokens with drafts and without; "
        f"{found['ties']} part at a float tie (gap up to {found['tolerance']:g}), "
        f"{found['failures']} elsewhere"
    ]
    for item in found["differing"]:
        gap = "unknown" if item["gap"] is None else f"{item['gap']:.4f}"
        tokens = f"{item['with_drafts']} with drafts, {item['without_drafts']} without"
        kind = "tie" if item["tie"] else "FAILURE"
        lines.append(f"  {item['task_id']}, token {item['position']}: {tokens}; gap {gap}: {kind}")
    for side, figures in found.get("pass_at_1", {}).items():
        low, high = figures["interval"]
        outcomes = ", ".join(f"{number} {name}" for name, number in figures["outcomes"].items())
        share = f"{figures['value']:.1%} ({low:.1%} to {high:.1%})"
        lines.append(f"pass@1 with drafts {side}: {share}: {outcomes}")
    if "passed_once" in found:
        on, off = (found["passed_once"][side] for side in SIDES)
        lines.append(f"passed with drafts alone: {on}; without drafts alone: {off}")
    return "\n".join(lines)
