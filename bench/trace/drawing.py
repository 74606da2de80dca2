"""Plots of K and load over time, and of each method's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.sweep.plots import GREY, STRONG, pyplot, save


def draw(
    timelines: Mapping[str, Sequence[Sequence[float]]],
    seconds: Mapping[str, Mapping[str, float]],
    stem: Path,
) -> list[Path]:
    """Draw a row of plots for each trace, and write it to files; returns their paths.

    `timelines` has adaptive K's (see watch.py) by trace, `seconds` the times by trace and label of
    the method. Raises NoPlots without matplotlib.
    """
    plt = pyplot()
    count = max(1, len(seconds))
    figure, panels = plt.subplots(
        count, 2, figsize=(13, 3.4 * count), layout="constrained", squeeze=False,
        width_ratios=(3, 1),
    )  # fmt: skip
    for (left, right), (name, taken) in zip(panels, seconds.items(), strict=False):
        _over_time(left, name, timelines.get(name, []))
        _taken(right, taken)
    return save(figure, stem)


def _over_time(panel: Any, name: str, timeline: Sequence[Sequence[float]]) -> None:
    times = [row[0] for row in timeline]
    panel.fill_between(times, [row[1] for row in timeline], step="post", color=GREY, alpha=0.4)
    panel.set(title=f"{name}: load and adaptive K", xlabel="seconds", ylabel="requests running")
    depth = panel.twinx()
    depth.step(times, [row[2] for row in timeline], where="post", color=STRONG, linewidth=1.4)
    depth.set_ylabel("K", color=STRONG)
    depth.yaxis.get_major_locator().set_params(integer=True)
    depth.set_ylim(bottom=0)
    panel.set_ylim(bottom=0)


def _taken(panel: Any, taken: Mapping[str, float]) -> None:
    colours = [STRONG if label == "adaptive" else GREY for label in taken]
    panel.barh(list(taken), list(taken.values()), color=colours)
    panel.invert_yaxis()
    panel.set(title="seconds for the same requests")
