"""Draw the dashboards from a Prometheus, without a Grafana.

Panels, their places and queries are those of the JSON that Grafana reads.
python -m deploy.grafana.picture http://127.0.0.1:9090 --minutes 5
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from deploy.grafana.dashboard_queries import FOLDER, DashboardQuery, panels

COLUMN, ROW = 0.68, 0.33  # inches of one cell of Grafana's grid of 24 columns
WINDOW = "20s"  # of rates: four scrapes of five seconds
STEPS = 150  # points of a line
UNITS = {
    "percentunit": (100.0, "%"),
    "s": (1.0, " s"),
    "ops": (1.0, "/s"),
    "reqps": (1.0, " req/s"),
    "suffix:×": (1.0, "×"),
    "short": (1.0, ""),
}


@dataclass(frozen=True)
class Span:
    """A span of Unix time in seconds, and the client that asks Prometheus for it."""

    http: httpx.Client
    start: float
    end: float

    def series(self, expr: str) -> list[tuple[dict[str, str], np.ndarray, np.ndarray]]:
        """Labels, minutes since the start [points] and values [points] of each series."""
        step = max(1.0, (self.end - self.start) / STEPS)
        answer = self.http.get(
            "/api/v1/query_range",
            params={"query": expr, "start": self.start, "end": self.end, "step": step},
        ).json()
        if answer["status"] != "success":
            raise SystemExit(f"{expr}: {answer['error']}")
        found = []
        for series in answer["data"]["result"]:
            points = np.array([[float(t), float(v)] for t, v in series["values"]])
            found.append((series["metric"], (points[:, 0] - self.start) / 60, points[:, 1]))
        return sorted(found, key=lambda s: [_number(v) for v in s[0].values()])


def _number(text: str) -> tuple[float, str]:
    """Sort key: numbers in their order, before names."""
    return (float(text), "") if text.isdigit() else (math.inf, text)


def _name(legend: str, labels: dict[str, str]) -> str:
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", value)
    return legend


def _queries(panel: dict[str, Any]) -> list[DashboardQuery]:
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    return [
        DashboardQuery("", panel["title"], panel["type"], unit, t["legendFormat"], t["expr"])
        for t in panel["targets"]
    ]


def _lines(axes: Axes, span: Span, queries: list[DashboardQuery]) -> None:
    factor, suffix = UNITS[queries[0].unit]
    for query in queries:
        for labels, minutes, values in span.series(query.filled(WINDOW)):
            axes.plot(minutes, values * factor, label=_name(query.legend, labels), lw=1.2)
    axes.set_xlim(0, (span.end - span.start) / 60)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}{suffix}")
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(fontsize=6, ncols=3, loc="upper right", framealpha=0.6)


def _number_now(axes: Axes, span: Span, queries: list[DashboardQuery]) -> None:
    [query] = queries
    factor, suffix = UNITS[query.unit]
    axes.set_axis_off()
    shown = span.series(query.filled(WINDOW))
    last = shown[0][2][-1] * factor if shown else math.nan
    text = "–" if math.isnan(last) else f"{last:.3g}{suffix}"
    axes.text(0.5, 0.45, text, fontsize=20, ha="center", va="center", color="#1f60c4")


def _bars(axes: Axes, span: Span, queries: list[DashboardQuery]) -> None:
    [query] = queries
    factor, suffix = UNITS[query.unit]
    shown = span.series(query.filled(WINDOW))
    names = [_name(query.legend, labels) for labels, _, _ in shown]
    finite = [values[np.isfinite(values)] for _, _, values in shown]
    last = [float(values[-1]) * factor if len(values) else 0.0 for values in finite]
    axes.barh(names, last, color="#3d71d9")
    axes.invert_yaxis()
    axes.set_xlim(0, factor)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{suffix}")


def _heat(axes: Axes, span: Span, queries: list[DashboardQuery]) -> None:
    [query] = queries
    factor, suffix = UNITS[query.unit]
    shown = span.series(query.filled(WINDOW))
    if not shown:
        return
    minutes = np.unique(np.concatenate([m for _, m, _ in shown]))
    table = np.full((len(shown), len(minutes)), np.nan)  # [series, moments]
    for i, (_, at, values) in enumerate(shown):
        table[i, np.searchsorted(minutes, at)] = values * factor
    table[table <= 0] = np.nan  # as Grafana, which leaves empty cells out
    image = axes.pcolormesh(minutes, range(len(shown)), table, cmap="Spectral_r", shading="nearest")
    axes.set_yticks(range(len(shown)), [_name(query.legend, labels) for labels, _, _ in shown])
    axes.set_xlim(0, (span.end - span.start) / 60)
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.tick_params(labelsize=6)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}{suffix}")


def _cloud(axes: Axes, span: Span, queries: list[DashboardQuery]) -> None:
    across, up = (dict(_points(span, query)) for query in queries)
    both = sorted(set(across) & set(up))
    axes.scatter([across[t] for t in both], [up[t] for t in both], s=8, alpha=0.5)
    axes.set_xlabel(queries[0].legend, fontsize=7)
    axes.set_ylabel(queries[1].legend, fontsize=7)
    axes.grid(alpha=0.25)


def _points(span: Span, query: DashboardQuery) -> list[tuple[float, float]]:
    [(_, minutes, values)] = span.series(query.filled(WINDOW)) or [({}, np.empty(0), np.empty(0))]
    return [(m, v) for m, v in zip(minutes, values, strict=True) if math.isfinite(v)]


DRAW: dict[str, Callable[[Axes, Span, list[DashboardQuery]], None]] = {
    "timeseries": _lines,
    "stat": _number_now,
    "bargauge": _bars,
    "heatmap": _heat,
    "xychart": _cloud,
}


def picture(name: str, span: Span) -> Figure:
    """One dashboard, laid out as on Grafana's grid."""
    shown = panels(name)
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in shown)
    figure = Figure(figsize=(24 * COLUMN, height * ROW), dpi=72)
    for heading in panels(name, headings=True):
        y = 1 - (heading["gridPos"]["y"] + 0.8) / height
        figure.text(0.01, y, heading["title"], fontsize=12, weight="bold")
    for panel in shown:
        at = panel["gridPos"]
        left, width = at["x"] / 24, at["w"] / 24
        bottom, tall = 1 - (at["y"] + at["h"]) / height, at["h"] / height
        margin, below, above = 0.03, 0.8 / height, 1.0 / height  # ticks left and below, title above
        axes = figure.add_axes(
            (left + margin, bottom + below, width - 1.3 * margin, tall - below - above)
        )
        axes.set_title(panel["title"], fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        DRAW[panel["type"]](axes, span, _queries(panel))
    return figure


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.picture", description=__doc__)
    parser.add_argument("prometheus", help="its address, as http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=5.0, help="how far to look back [5]")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.time()
    with httpx.Client(base_url=options.prometheus, timeout=30, trust_env=False) as http:
        for file in sorted(FOLDER.glob("*.json")):
            span = Span(http, end - options.minutes * 60, end)
            path = options.out / f"dashboard-{file.stem}.png"
            picture(file.stem, span).savefig(path)
            # Few colours need few bytes.
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
            print(path, f"{path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
