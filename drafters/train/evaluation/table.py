"""The output of an evaluation: figures with intervals, as a Markdown table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from drafters.markdown import columns
from drafters.train.evaluation.greedy_replay import AcceptanceCounts
from drafters.train.evaluation.statistics import draw_weights, ratio_intervals

Interval = tuple[float, float]
LEGEND = (
    "Columns 1, 2, ...: share of all steps that accepted the draft at this position.\n"
    "±: half of the 95% interval, by bootstrap over prompts."
)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one workload at one K. There are no intervals for a single request."""

    steps: int
    length: float
    per_position: list[float]
    conditional: list[float | None]
    length_interval: Interval | None
    position_intervals: list[Interval] | None


def figures(results: Mapping[int, AcceptanceCounts], seed: int) -> dict[int, Figures]:
    """Figures of the same requests at several K; all intervals use the same resamples."""
    requests = len(next(iter(results.values())).steps)
    weights = draw_weights(requests, seed)
    found = {}
    for count, result in results.items():
        spans: list[Interval] = []
        if requests > 1:
            tokens = result.steps + result.accepted.sum(1)  # every step adds the bonus token
            parts = torch.cat([tokens[:, None], result.accepted], dim=1)
            ends = ratio_intervals(parts, result.steps, weights)
            ends[0].clamp_(1.0, count + 1.0)
            ends[1:].clamp_(0.0, 1.0)
            spans = [(low, high) for low, high in ends.tolist()]
        found[count] = Figures(
            steps=int(result.steps.sum()),
            length=result.length,
            per_position=result.per_position,
            conditional=result.conditional,
            length_interval=spans[0] if spans else None,
            position_intervals=spans[1:] or None,
        )
    return found


def format_table(table: Mapping[str, Mapping[int, Figures]]) -> str:
    """Format a Markdown table that is aligned for a terminal too. Every line starts with "|"."""
    positions = max(max(rows) for rows in table.values())
    lines = [["workload", "K", "acceptance length", *(str(i + 1) for i in range(positions))]]
    for name, rows in table.items():
        for count, row in rows.items():
            length = f"{row.length:.2f}"
            if row.length_interval is not None:
                length += f" ± {_half(row.length_interval):.2f}"
            spans = row.position_intervals or []
            cells = [_cell(share, span) for share, span in zip_longest(row.per_position, spans)]
            lines.append([name.replace("|", "\\|"), str(count), length, *cells])
    lines = [line + [""] * (3 + positions - len(line)) for line in lines]
    return "\n".join(columns(lines))


def as_json(table: Mapping[str, Mapping[int, Figures]], **facts: Any) -> str:
    """One line of JSON: `facts`, and the figures of each workload and K."""
    workloads = {
        name: {str(count): _document(row) for count, row in rows.items()}
        for name, rows in table.items()
    }
    return json.dumps({**facts, "workloads": workloads}, allow_nan=False)


def _document(row: Figures) -> dict[str, Any]:
    return {
        "acceptance_length": round(row.length, 4),
        "per_position": _rounded(row.per_position),
        "acceptance_length_ci": row.length_interval and _rounded(row.length_interval),
        "per_position_ci": row.position_intervals
        and [_rounded(span) for span in row.position_intervals],
        "conditional": _rounded(row.conditional),
        "steps": row.steps,
    }


def _rounded(values: list[float] | list[float | None] | Interval) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]


def _half(span: Interval) -> float:
    return (span[1] - span[0]) / 2.0


def _cell(share: float, span: Interval | None) -> str:
    """A share with half its interval, without leading zeros: `.736 ±.021`."""
    text = _bare(share)
    return text if span is None else f"{text} ±{_bare(_half(span))}"


def _bare(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")
