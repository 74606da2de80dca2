"""Plots of a simulation: replayed speed-ups, and K over time under moving loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.simulate.compare import Moving
from bench.simulate.fit import Ratio
from bench.sweep.plots import GREY, STRONG, pyplot


def figure_of(ratios: Sequence[Ratio], loads: Sequence[Moving]) -> Any:
    """One panel of speed-ups, then one for each moving load. Raises NoPlots without matplotlib."""
    count = 1 + len(loads)
    figure, panels = pyplot().subplots(
        count, 1, figsize=(9, 3.2 * count), layout="constrained", squeeze=False
    )
    _speedups(panels[0][0], ratios)
    for (panel,), moving in zip(panels[1:], loads, strict=True):
        _over_time(panel, moving)
    return figure


def _speedups(panel: Any, ratios: Sequence[Ratio]) -> None:
    """Plot simulated against published speed-ups; on the diagonal they agree."""
    panel.axline((1.0, 1.0), slope=1.0, color=GREY, linewidth=0.8)
    for label, colour, fitted in (("fitted", GREY, True), ("held out", STRONG, False)):
        chosen = [ratio for ratio in ratios if ratio.fitted is fitted]
        published = [ratio.published for ratio in chosen]
        simulated = [ratio.simulated for ratio in chosen]
        panel.plot(published, simulated, "o", color=colour, markersize=4, label=label)
    panel.set(title="Speed-up of P-EAGLE", xlabel="published", ylabel="simulated")
    panel.legend()


def _over_time(panel: Any, moving: Moving) -> None:
    """Plot the requests in each step as an area, and the controller's K as a line."""
    times, requests, ks = zip(*moving.timeline, strict=True)
    panel.fill_between(times, requests, step="post", color=GREY, alpha=0.4)
    panel.set(xlabel="seconds", ylabel="requests", ylim=(0, None))
    panel.set_title(f"{moving.name}: {moving.over_best:.3f}x the best fixed K ({moving.best_k})")
    drafts = panel.twinx()
    drafts.step(times, ks, where="post", color=STRONG, linewidth=0.8)
    drafts.set_ylabel("K", color=STRONG)
    drafts.set_ylim(bottom=0)
