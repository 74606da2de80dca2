"""The report of a sweep: one HTML file that needs no other, to be read in a minute."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench.load.intervals import Interval
from bench.sweep.table import INEXACT, Row, Table, marked_speed
from bench.workloads.load import label

APART = (
    "Servers ran one after the other: what the machine's speed changed by between them is in the "
    "ratios of methods of different servers, and not in the intervals of these ratios."
)
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em}
body{color:#1f2933}
table{border-collapse:collapse;margin:.6em 0 1.4em}td,th{padding:.25em .7em;text-align:right}
th{border-bottom:1px solid #9aa5b1;font-weight:600}tr:nth-child(even){background:#f4f6f8}
td:first-child,th:first-child{text-align:left}.best{font-weight:700}
svg{width:100%;height:auto}h1{font-size:1.5em}h2{font-size:1.1em;margin-top:1.6em}
small,details{color:#52606d}pre{white-space:pre-wrap}
"""


def html(table: Table, plan: Mapping[str, Any], provenance: Mapping[str, Any], drawing: str) -> str:
    """The report as an HTML page. `drawing` is the SVG text of the plots."""
    name = label(plan["workload"])
    title = f"Speculation on {name}: {', '.join(provenance.get('gpus') or [_machine(provenance)])}"
    parts = [f"<h1>{escape(title)}</h1>", _headline(table), drawing]
    parts += ["<h2>Output tokens per second, and over no speculation</h2>", _speeds(table)]
    if table.has_inexact:
        parts.append(f"<p><small>{escape(INEXACT)}</small></p>")
    for heading, rows in table.best_tables():
        parts += [f"<h2>{escape(heading)}</h2>", _table(rows)]
    parts += ["<h2>Figures of one user, and of drafts</h2>", _details(table)]
    parts += [_method(plan), _origin(plan, provenance)]
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><body>\n{body}\n</body></html>\n"
    )


def _machine(provenance: Mapping[str, Any]) -> str:
    return f"{provenance.get('cores')} cores, {provenance.get('cpu')}"


def _headline(table: Table) -> str:
    """The main results in three sentences."""
    said = []
    adaptive = [row for (m, _), row in table.rows.items() if m.name == "adaptive"]
    over = [(r.concurrency, *r.over["none"]) for r in adaptive if "none" in r.over]
    for rows in (over[:1], over[1:][-1:]):  # the lowest load and the highest
        said += [
            f"Adaptive K is {_with(ratio, spread)} times no speculation at {c} "
            f"user{'s' * (c > 1)}." for c, ratio, spread in rows
        ]  # fmt: skip
    best = [item for item in table.best if not item.head]
    if best and table.has_fixed_k(""):
        worst = min(best, key=lambda item: item.ratio)
        ahead = sum(item.ratio >= 1 for item in best)
        said.append(
            f"Against the best fixed K of each load, chosen after the fact, it is never below "
            f"{worst.ratio:.3f} (at {worst.concurrency}) and ahead at {ahead} of "
            f"{len(best)} loads."
        )
    return f"<p>{escape(' '.join(said))}</p>" if said else ""


def _with(value: float, spread: Interval | None) -> str:
    return f"{value:.2f}" + (f" [{spread[0]:.2f}, {spread[1]:.2f}]" if spread else "")


def _speeds(table: Table) -> str:
    used = [m for m in table.methods if any(key[0] == m for key in table.rows)]
    rows = [["users", *(m.label for m in used)]]
    for c in table.concurrencies:
        here = [table.rows.get((m, c)) for m in used]
        top = max((r.speed for r in here if r), default=0.0)
        rows.append([str(c), *(_speed(row, top) for row in here)])
    return _table(rows)


def _speed(row: Row | None, top: float) -> str:
    if row is None:
        return ""
    text = marked_speed(row)
    if "none" in row.over:
        text += f" <small>{row.over['none'][0]:.2f}x</small>"
    if "EAGLE-3" in row.over:
        text += f" <small>({row.over['EAGLE-3'][0]:.2f}x E)</small>"
    return f'<span class="best">{text}</span>' if row.speed == top else text


def _details(table: Table) -> str:
    heads = {
        "user": ("tokens/s of one user", ".0f"), "ttft_ms": ("first token, ms", ".0f"),
        "itl_p99_ms": ("p99 between chunks, ms", ".0f"), "e2e_ms": ("whole answer, ms", ".0f"),
        "length": ("acceptance length", ".2f"), "k": ("mean K", ".2f"),
    }  # fmt: skip
    rows = [["method", "users", *(title for title, _ in heads.values()), "accepted by position"]]
    for (method, c), row in table.rows.items():
        cells = [
            format(row.figures[n], f) if n in row.figures else "" for n, (_, f) in heads.items()
        ]
        shares = " ".join(f"{share:.2f}" for share in row.acceptance)
        rows.append([method.label, str(c), *cells, shares])
    return f"<details><summary>all of them</summary>{_table(rows)}</details>"


def _method(plan: Mapping[str, Any]) -> str:
    said = [f"Every cell is {plan['rounds']} rounds; in a round each method runs once, in random "
            f"order, with the same prompts; {', '.join(_requests(plan))}."]  # fmt: skip
    if plan.get("switchback"):
        said.append(
            f"Methods take turns of {plan['seconds']:g} s under one load; the first "
            f"{plan['settle']:g} s of each do not count. Tokens are the server's count."
        )
    else:
        said.append("Tokens are the server's count; prompts and a run's tail are in the time.")
    said.append("Ratios are within rounds; intervals are 95%, by bootstrap over rounds.")
    said.append("All servers ran at once." if plan["together"] else APART)
    said.append("x: over no speculation (vLLM's own server where it ran); E: over EAGLE-3.")
    return f"<p><small>{escape(' '.join(said))}</small></p>"


def _requests(plan: Mapping[str, Any]) -> list[str]:
    """What the requests of a plan have in common."""
    spread, temperature = plan.get("spread", 0.0), plan.get("temperature", 0.0)
    tokens = f"{plan['max_tokens']}" + f" ± {spread:.0%}" * bool(spread)
    most = "at most " * bool(plan.get("stop_at_eos") or plan.get("constraint"))
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    said = [f"{most}{tokens} tokens an answer", sampling]
    if context := plan.get("context"):
        said.append(f"about {context} tokens of source code before each prompt")
    if plan.get("cached_prompts"):
        said.append("prompts were in the prefix cache")
    if constraint := plan.get("constraint"):
        said.append(f"answers held to {label(constraint)}")
    return said


def _origin(plan: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    text = json.dumps({"provenance": provenance, "plan": plan}, indent=1)
    return f"<details><summary>how it was measured</summary><pre>{escape(text)}</pre></details>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table. Cells are HTML that this module makes, so that they are not escaped."""
    lines = ["<table>"]
    for index, row in enumerate(rows):
        tag = "td" if index else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table>"])
