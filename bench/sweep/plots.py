"""Plots of a sweep: speed-up, the throughput-interactivity frontier, acceptance by position."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bench.sweep.table import Table
from bench.systems.method import Method

GREY, STRONG = "#8a94a0", "#c2410c"
_KINDS = {
    "none": GREY,
    "plain": "#5b6470",
    "off": "#334155",
    "eagle3": "#7c3aed",
    "vllm": "#2563eb",
    "other": "#b45309",
}
_DASHES = ("--", ":", "-.")  # by K, for kinds of methods that have one colour
_FIXED = ("#0e7490", "#0d9488", "#65a30d", "#ca8a04", "#db2777", "#9333ea")


class NoPlots(RuntimeError):
    """matplotlib is not installed."""


def pyplot() -> Any:
    """matplotlib's pyplot, without a display. Raises NoPlots if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise NoPlots("plots need matplotlib: pip install '.[bench]'") from None
    matplotlib.use("Agg")
    # Text as text, not as paths: smaller, and a search in the report finds it.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "aerie", "font.size": 9})
    from matplotlib import pyplot as plt

    return plt


def figure_of(table: Table) -> Any:
    """The figure of a sweep, with three panels. Raises NoPlots."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    used = [m for m in table.methods if any(key[0] == m for key in table.rows)]
    look = {method: _look(method, used) for method in used}
    _speedups(panels[0], table, look)
    _frontier(panels[1], table, look)
    _acceptance(panels[2], table, look)
    return figure


def svg(figure: Any) -> str:
    """The figure as SVG text without the XML header, for use inside HTML."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def save(figure: Any, stem: Path) -> list[Path]:
    """Write the figure as `stem`.svg and `stem`.png; returns both paths."""
    files = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    figure.savefig(files[0], metadata={"Date": None})
    figure.savefig(files[1], dpi=130)
    return files


def _look(method: Method, used: list[Method]) -> dict[str, Any]:
    if method.kind == "adaptive":
        line = "--" if method.head else "-"
        look = {"color": STRONG, "linewidth": 2.6, "marker": "o", "zorder": 5}
        return {**look, "linestyle": line}
    alike = [m for m in used if (m.kind, m.head) == (method.kind, method.head)]
    number = alike.index(method)
    colour = _KINDS.get(method.kind) or _FIXED[number % len(_FIXED)]
    others = method.kind in ("none", "plain", "eagle3", "vllm", "other")
    style = _DASHES[number % len(_DASHES)] if others else ":" if method.head else "-"
    return {"color": colour, "linewidth": 1.2, "marker": ".", "linestyle": style}


def _speedups(panel: Any, table: Table, look: dict[Method, dict[str, Any]]) -> None:
    for method, style in look.items():
        rows = [table.rows.get((method, c)) for c in table.concurrencies]
        points = [(r.concurrency, *r.over["none"]) for r in rows if r and "none" in r.over]
        if not points:
            continue
        x, y = [p[0] for p in points], [p[1] for p in points]
        low = [v - (s[0] if s else v) for _, v, s in points]
        high = [(s[1] if s else v) - v for _, v, s in points]
        errors = [[max(0.0, e) for e in low], [max(0.0, e) for e in high]]
        panel.errorbar(x, y, yerr=errors, label=method.label, elinewidth=0.8, capsize=2, **style)
    panel.axhline(1.0, color="#333", linewidth=0.8)
    panel.set(title="Speed-up over no speculation", xlabel="concurrent users", ylabel="x")
    _powers_of_two(panel, table)
    _legend(panel, "K = 0 was not measured")


def _frontier(panel: Any, table: Table, look: dict[Method, dict[str, Any]]) -> None:
    for method, style in look.items():
        rows = [table.rows.get((method, c)) for c in table.concurrencies]
        points = [(r.figures["user"], r.speed) for r in rows if r and "user" in r.figures]
        if points:
            panel.plot(*zip(*points, strict=True), label=method.label, **style)
    panel.set(
        title="Throughput against interactivity (each dot a concurrency)",
        xlabel="tokens/s of one user", ylabel="tokens/s of all",
    )  # fmt: skip
    panel.set_ylim(bottom=0)
    _legend(panel, "turns on one gateway\nhave no whole answers")


def _acceptance(panel: Any, table: Table, look: dict[Method, dict[str, Any]]) -> None:
    """Plot acceptance by position at the lowest concurrency, where all methods draft."""
    panel.xaxis.get_major_locator().set_params(integer=True)
    first = table.concurrencies[0] if table.concurrencies else 0
    for method, style in look.items():
        row = table.rows.get((method, first))
        if row and row.acceptance:
            positions = range(1, len(row.acceptance) + 1)
            panel.plot(positions, row.acceptance, label=method.label, **style)
    panel.set(
        title=f"Share of drafted steps that accept, {first} user{'s' * (first > 1)}",
        xlabel="position", ylabel="share", ylim=(0, 1),
    )  # fmt: skip


def _legend(panel: Any, absent: str) -> None:
    """Name the lines, or say with `absent` why there are none."""
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=7)
    else:
        panel.text(0.5, 0.5, absent, ha="center", va="center", transform=panel.transAxes)


def _powers_of_two(panel: Any, table: Table) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(table.concurrencies, [str(c) for c in table.concurrencies])
