"""One panel for each place: every policy's ratio with its interval."""

from __future__ import annotations

from pathlib import Path

from bench.ablation.table import Table
from bench.sweep.plots import GREY, STRONG, pyplot, save


def draw(table: Table, stem: Path) -> list[Path]:
    """`stem`.svg and .png. Raises NoPlots without matplotlib."""
    plt = pyplot()
    count, names = max(1, len(table.places)), [m.label for m in table.methods]
    figure, panels = plt.subplots(
        1, count, figsize=(3.2 + 2.1 * count, 0.9 + 0.26 * len(names)), layout="constrained",
        squeeze=False, sharey=True,
    )  # fmt: skip
    for panel, place in zip(panels[0], table.places, strict=False):
        for row, method in enumerate(table.methods):
            ratio = table.ratio(method.name, table.reference, place)
            if ratio is None:
                continue
            low, high = ratio.interval or (ratio.value, ratio.value)
            colour = STRONG if method.kind == "policy" else GREY
            panel.plot([low, high], [row, row], color=colour, linewidth=1.2)
            panel.plot([ratio.value], [row], "o", color=colour, markersize=4)
        panel.axvline(1.0, color="#333", linewidth=0.8)
        panel.set(title=f"{place[0]}, {place[1]}", xlabel=f"over {table.reference}")
        panel.set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    return save(figure, stem)
