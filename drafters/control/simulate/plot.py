"""A drawing of a simulation, as SVG without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from drafters.control.simulate.compare import Moving
from drafters.control.simulate.fit import Ratio

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 300, 60, 20, 40, 45
FITTED, HELD_OUT, LOAD, DRAFTS = "#9aa5b1", "#c2410c", "#0f766e", "#c2410c"


class Panel:
    """One pair of axes, `top` pixels from the drawing's."""

    def __init__(self, top: float, title: str, x_label: str, x: tuple[float, float]) -> None:
        self._top, self._x = top + TOP, x
        self._parts = [_text(LEFT, top + 22, title, size=14)]
        self._parts.append(_text(WIDTH / 2, top + HEIGHT - 8, x_label, anchor="middle"))
        self._parts.append(
            f'<rect x="{LEFT}" y="{self._top}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{HEIGHT - TOP - BOTTOM}" fill="none" stroke="#ccc"/>'
        )
        for value in _ticks(*x):
            where = self._across(value)
            self._parts.append(
                _text(where, top + HEIGHT - BOTTOM + 15, f"{value:g}", anchor="middle")
            )

    def __str__(self) -> str:
        return "\n".join(self._parts)

    def scale(self, y: tuple[float, float], colour: str, label: str, right: bool = False) -> None:
        """Numbers along the left edge, or inside the right one."""
        edge, anchor = (WIDTH - RIGHT - 5, "end") if right else (LEFT - 6, "end")
        for value in _ticks(*y):
            where = self._up(value, y) + 4
            self._parts.append(_text(edge, where, f"{value:g}", colour, anchor=anchor))
        where, anchor = (WIDTH - RIGHT, "end") if right else (LEFT, "start")
        self._parts.append(_text(where, self._top - 4, label, colour, anchor=anchor))

    def points(
        self, values: Sequence[tuple[float, float]], y: tuple[float, float], colour: str
    ) -> None:
        """Dots."""
        self._parts += [
            f'<circle cx="{self._across(a):.1f}" cy="{self._up(b, y):.1f}" r="3.5" '
            f'fill="{colour}" fill-opacity="0.8"/>'
            for a, b in values
        ]

    def line(
        self, values: Sequence[tuple[float, float]], y: tuple[float, float], colour: str
    ) -> None:
        """A line through points."""
        path = " ".join(f"{self._across(a):.1f},{self._up(b, y):.1f}" for a, b in values)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')

    def _across(self, value: float) -> float:
        low, high = self._x
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def _up(self, value: float, y: tuple[float, float]) -> float:
        low, high = y
        return self._top + (HEIGHT - TOP - BOTTOM) * (1.0 - (value - low) / (high - low))


def draw(ratios: Sequence[Ratio], loads: Sequence[Moving]) -> str:
    """Published against simulated ratios, then K and load over time of each trace."""
    top = max(max(ratio.published, ratio.simulated) for ratio in ratios) * 1.05
    reach = (0.9, top)
    first = Panel(0, "Speedups: simulated against published", "published", reach)
    first.scale(reach, "#333", "simulated (grey: fitted, red: held out)")
    first.line([(0.9, 0.9), (top, top)], reach, "#999")
    for colour, fitted in ((FITTED, True), (HELD_OUT, False)):
        chosen = [(r.published, r.simulated) for r in ratios if r.fitted is fitted]
        first.points(chosen, reach, colour)
    panels = [first]
    for moving in loads:
        times = moving.timeline
        panel = Panel(
            HEIGHT * len(panels),
            f"{moving.name}: {moving.over_best:.3f}x the best fixed K ({moving.best_k})",
            "seconds",
            (0.0, times[-1][0]),
        )
        busiest, deepest = (max(row[i] for row in times) for i in (1, 2))
        for column, most, colour in ((1, busiest, LOAD), (2, deepest, DRAFTS)):
            y = (0.0, max(1.0, 1.1 * most))
            label = "requests in the step" if column == 1 else "K"
            panel.scale(y, colour, label, right=column == 2)
            panel.line(_stairs([(row[0], row[column]) for row in times]), y, colour)
        panels.append(panel)
    body = "\n".join(map(str, panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{HEIGHT * len(panels)}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _stairs(values: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each value holds until the next."""
    stairs = [values[0]]
    for time, value in values[1:]:
        stairs += [(time, stairs[-1][1]), (time, value)]
    return stairs


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between."""
    rough = (high - low) / 5.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    return [round(step * i, 10) for i in range(first, math.floor(high / step) + 1)]


def _text(
    x: float, y: float, text: str, colour: str = "#333", *, size: int = 11, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
