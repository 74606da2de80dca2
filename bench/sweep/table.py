"""The tables of a sweep, as in vLLM's launch article of P-EAGLE.

They have tokens per second, their ratios over no speculation, over EAGLE-3 and over the head
without other sources of drafts, and those of adaptive K over the best fixed K, with intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean
from typing import Any

from bench.load.intervals import (
    Interval,
    Mean,
    interval,
    of_equal_work,
    over_best,
    over_best_of_other_rounds,
    ratio,
    speed,
)
from bench.systems.method import Method
from drafters.markdown import columns

# Name of a baseline -> kinds or names of methods that can be it, preferred ones first.
BASES = {
    "none": ("none", "plain", "off"),
    "EAGLE-3": ("eagle3",),
    "the head alone": ("adaptive:head",),
}
_BASE = {
    "none": "vLLM's own server without speculation",
    "plain": "this gateway without a head",
    "off": "this gateway at K = 0",
    "eagle3": "vLLM's own server",
    "adaptive:head": "this gateway, adaptive K without other sources",
}

INEXACT = "*: the model ended its answers, so that methods may not have done equal work."

Cells = Mapping[tuple[Any, ...], Mapping[str, Any]]  # (method, concurrency, round) -> figures


@dataclass(frozen=True)
class Row:
    """The figures of a method at a concurrency, over all rounds.

    `figures` are means over the rounds that have them, without intervals:

        user                              tokens/s of one user, median of 1 / TPOT over requests
        ttft_ms, tpot_ms, e2e_ms          medians over requests, ms
        itl_p99_ms                        99% quantile of the times between chunks, ms
        length                            tokens per drafted step
        k                                 drafts per step
        gauge                             the gateway's estimate of its speed-up, a ratio
        control                           probes and decisions, share of decode time

    `accepted_by_source` is the share of tokens that were accepted drafts of a source.
    `acceptance` is the share of drafted steps that accepted the draft at a position, first to last;
    its sum is `length` less 1. `exact` says whether every answer had the length asked for. `over`
    is a baseline's name -> tokens/s over the baseline's, with its 95% interval.
    """

    method: Method
    concurrency: int
    speed: float  # tokens/s
    interval: Interval | None
    rounds: int
    figures: dict[str, float]
    acceptance: list[float]
    accepted_by_source: dict[str, float]
    exact: bool
    over: dict[str, tuple[float, Interval | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Best:
    """Adaptive K, of every source if the plan has that, against the best fixed K of the same head
    at a concurrency.

    `unbiased` is the ratio where other rounds choose the best fixed K of a round; it has no
    interval.
    """

    concurrency: int
    head: str  # Method.head
    best: Method
    ratio: float
    interval: Interval | None
    unbiased: float | None


class Table:
    """All figures of a sweep, computed once; `cells` may be incomplete. `mean` joins a method's
    rounds."""

    def __init__(self, methods: Sequence[Method], cells: Cells, mean: Mean = of_equal_work) -> None:
        self.methods = list(methods)
        self._mean = mean
        self.concurrencies = sorted({key[1] for key in cells})
        self._cells = cells
        self.rows: dict[tuple[Method, int], Row] = {}
        for concurrency in self.concurrencies:
            self._add(concurrency)
        self.best = self._bests("tokens_per_second")
        self.steady = self._bests("steady_tokens_per_second")

    def speeds(
        self, method: Method, concurrency: int, figure: str = "tokens_per_second"
    ) -> dict[int, float]:
        """Round -> tokens per second, or another `figure`."""
        return {
            number: cell[figure]
            for (name, c, number), cell in self._cells.items()
            if name == method.name and c == concurrency and figure in cell
        }

    def baseline(self, kinds: Sequence[str], concurrency: int) -> Method | None:
        """The method that ratios are over: the fastest of the first kind that the plan has."""
        kind = self.kind(kinds)
        there = [
            m for m in self.methods if kind in (m.kind, m.name) and (m, concurrency) in self.rows
        ]
        return max(there, key=lambda m: self.rows[m, concurrency].speed, default=None)

    def kind(self, kinds: Sequence[str]) -> str | None:
        """The first of these kinds or names that the plan has, the same for every concurrency."""
        planned = {name for method in self.methods for name in (method.kind, method.name)}
        return next((kind for kind in kinds if kind in planned), None)

    def _add(self, concurrency: int) -> None:
        for method in self.methods:
            speeds = self.speeds(method, concurrency)
            if speeds:
                self.rows[method, concurrency] = self._row(method, concurrency, speeds)
        for name, kinds in BASES.items():
            base = self.baseline(kinds, concurrency)
            for method in self.methods:
                if base is None or base == method or (method, concurrency) not in self.rows:
                    continue
                pair = self.speeds(method, concurrency), self.speeds(base, concurrency)
                if set(pair[0]) & set(pair[1]):
                    self.rows[method, concurrency].over[name] = ratio(*pair, mean=self._mean)

    def _row(self, method: Method, concurrency: int, speeds: dict[int, float]) -> Row:
        cells = [self._cells[method.name, concurrency, number] for number in speeds]
        names = {
            "user": ("user_tokens_per_second",),
            "ttft_ms": ("ttft_ms", "p50"),
            "tpot_ms": ("tpot_ms", "p50"),
            "itl_p99_ms": ("itl_ms", "p99"),
            "e2e_ms": ("e2e_ms", "p50"),
            "length": ("acceptance_length",),
            "k": ("k_mean",),
            "gauge": ("gauge",),
            "control": ("control",),
        }
        means = {name: _mean(cells, path) for name, path in names.items()}
        figures = {name: mean for name, mean in means.items() if mean is not None}
        positions = [cell["acceptance"] for cell in cells if cell.get("acceptance")]
        deepest = max(map(len, positions), default=0)
        # A cell that drafted less deeply accepted nothing there: the sum is the length less 1.
        acceptance = [fmean(p[i] if len(p) > i else 0.0 for p in positions) for i in range(deepest)]
        rounds = sorted(speeds)
        spread = interval(rounds, lambda chosen: speed(speeds, chosen, mean=self._mean))
        total = speed(speeds, rounds, mean=self._mean)
        sources = accepted_by_source(cells)
        exact = all(cell.get("ignore_eos", True) for cell in cells)
        return Row(
            method, concurrency, total, spread, len(rounds), figures, acceptance, sources, exact
        )

    def _bests(self, figure: str) -> list[Best]:
        heads = dict.fromkeys(method.head for method in self.methods)
        found = (self._best(c, figure, head) for head in heads for c in self.concurrencies)
        return [best for best in found if best is not None]

    def _best(self, concurrency: int, figure: str, head: str) -> Best | None:
        rows = [m for (m, c) in self.rows if c == concurrency and m.head == head]
        there = {method: self.speeds(method, concurrency, figure) for method in rows}
        choices = (m for m in there if m.kind == "adaptive")
        adaptive = min(choices, key=lambda m: bool(m.sources), default=None)  # all sources first
        if adaptive is None:
            return None
        # A K above 0 with half of the rounds or fewer was dropped as too slow (--drop-below).
        half = len(there[adaptive]) / 2
        fixed = [m for m in there if m.kind == "off" or (m.kind == "k" and len(there[m]) > half)]
        if not fixed or not set(there[adaptive]).intersection(*(there[m] for m in fixed)):
            return None
        pair = there[adaptive], [there[m] for m in fixed]
        share, spread = over_best(*pair, mean=self._mean)
        unbiased = over_best_of_other_rounds(*pair, mean=self._mean)
        best = max(fixed, key=lambda m: speed(there[m], sorted(there[m]), mean=self._mean))
        return Best(concurrency, head, best, share, spread, unbiased)

    @property
    def has_inexact(self) -> bool:
        """Whether answers of a row may have had other lengths than those asked for."""
        return not all(row.exact for row in self.rows.values())

    def text(self) -> str:
        """All tables as Markdown that is aligned for a terminal too."""
        lines = ["Output tokens per second (± half of the 95% interval, by bootstrap over rounds):"]
        lines += columns(self._grid(marked_speed))
        if self.has_inexact:
            lines += ["", INEXACT]
        for name in BASES:
            if any(name in row.over for row in self.rows.values()):
                of = _BASE[self.kind(BASES[name]) or ""]
                lines += ["", f"Over {name} ({of}) in the same rounds:"]
                lines += columns(self._grid(lambda row, name=name: _over(row, name)))  # type: ignore[misc]
        for name, title, form in (
            ("user", "Tokens per second of one user (median 1 / TPOT)", ".0f"),
            ("ttft_ms", "Time to first token, median, ms", ".1f"),
            ("length", "Acceptance length (tokens per drafted step)", ".2f"),
            ("k", "Mean K over steps", ".2f"),
            ("control", "Cost of control (probes and decisions, share of decode time)", ".2%"),
        ):
            if any(name in row.figures for row in self.rows.values()):
                lines += ["", f"{title}:"]
                lines += columns(
                    self._grid(
                        lambda r, n=name, f=form: format(r.figures[n], f) if n in r.figures else ""  # type: ignore[misc]
                    )
                )
        if any(row.accepted_by_source for row in self.rows.values()):
            lines += ["", "Accepted drafts by source (share of all tokens):"]
            lines += columns(self._grid(lambda row: by_source(row.accepted_by_source)))
        for heading, rows in self.best_tables():
            lines += ["", f"{heading}:", *columns(rows)]
        return "\n".join(lines)

    def best_tables(self) -> list[tuple[str, list[list[str]]]]:
        """Adaptive K against the best fixed K: a heading and rows of text, for each head.

        The last row is the geometric mean over concurrencies. It has no interval: loads are chosen,
        not drawn from many.
        """
        found = []
        for ending, best in (
            ("", self.best),
            (", while every user is served (without start and tail)", self.steady),
        ):
            for head in dict.fromkeys(item.head for item in best):
                heading = f"{self._best_title(head)}{ending}{', our EAGLE-3' * bool(head)}"
                found.append((heading, _best_rows(best, head)))
        return found

    def has_fixed_k(self, head: str) -> bool:
        """Whether a fixed K above 0 was measured with a head, for adaptive K to be held against."""
        return any(method.kind == "k" and method.head == head for method, _ in self.rows)

    def _best_title(self, head: str) -> str:
        if self.has_fixed_k(head):
            return "Adaptive over the best fixed K (K = 0 included, chosen after the fact)"
        return "Adaptive over K = 0 (no other fixed K was measured)"

    def _grid(self, show: Any) -> list[list[str]]:
        used = [m for m in self.methods if any(key[0] == m for key in self.rows)]
        rows = [["c", *(method.label for method in used)]]
        for c in self.concurrencies:
            found = [self.rows.get((method, c)) for method in used]
            rows.append([str(c), *("" if row is None else show(row) for row in found)])
        return rows


def marked_speed(row: Row) -> str:
    """Tokens per second with their interval, and the mark of INEXACT where that holds."""
    return pm(row.speed, row.interval, ".0f") + "*" * (not row.exact)


def _best_rows(best: Iterable[Best], head: str) -> list[list[str]]:
    rows = [["c", "best fixed", "adaptive / best", "95% interval", "best of other rounds"]]
    items = [item for item in best if item.head == head]
    for item in items:
        spread = " to ".join(f"{end:.3f}" for end in item.interval or ())
        unbiased = "" if item.unbiased is None else f"{item.unbiased:.3f}"
        rows.append([str(item.concurrency), item.best.label, f"{item.ratio:.3f}", spread, unbiased])
    if len(items) > 1:
        mean = geometric_mean(item.ratio for item in items)
        known = [item.unbiased for item in items if item.unbiased is not None]
        unbiased = f"{geometric_mean(known):.3f}" if len(known) == len(items) else ""
        rows.append(["geometric mean", "", f"{mean:.3f}", "", unbiased])
    return rows


def accepted_by_source(cells: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Source -> share of the tokens that were its accepted drafts, in those of these cells that
    have drafts."""
    accepted: dict[str, float] = {}
    tokens = 0
    for cell in cells:
        if "sources" not in cell:
            continue
        tokens += cell["tokens"]
        for source, counts in cell["sources"].items():
            accepted[source] = accepted.get(source, 0.0) + counts["accepted"]
    return {source: count / tokens for source, count in accepted.items()}


def by_source(shares: Mapping[str, float]) -> str:
    """The shares of `accepted_by_source` as text."""
    return ", ".join(f"{source} {share:.0%}" for source, share in shares.items())


def _over(row: Row, name: str) -> str:
    if name not in row.over:
        return ""
    value, spread = row.over[name]
    return pm(value, spread, ".2f")


def _mean(cells: Iterable[Mapping[str, Any]], path: Sequence[str]) -> float | None:
    values = []
    for cell in cells:
        value: Any = cell
        for name in path:
            value = value.get(name) if value else None
        if value is not None:
            values.append(float(value))
    return fmean(values) if values else None


def pm(value: float, spread: Interval | None, form: str) -> str:
    """A value with half of its interval, as text; `form` is a format specification."""
    if spread is None:
        return format(value, form)
    return f"{value:{form}} ±{(spread[1] - spread[0]) / 2:{form}}"
