"""`aerie bench sweep`: methods against concurrency, on engines that it starts and stops itself."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.errors import AerieError
from app.settings import REPOSITORY
from bench.provenance import gpus, provenance
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal, JournalError
from bench.sweep.plots import NoPlots, figure_of, save, svg
from bench.sweep.report import html
from bench.sweep.run import Plan, sweep
from bench.sweep.table import Table
from bench.systems import method as methods_module
from bench.systems.method import DEFAULT, parse
from bench.workloads.embedded import SEED
from bench.workloads.files import MalformedFile

CONCURRENCIES = "1,2,4,8,16,32,64,128"
EAGLE3 = str(REPOSITORY / "models" / "embedded" / "eagle3")


def main(argv: Sequence[str]) -> int:
    """Measure what is missing, print the table; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        journal = Journal(args.out)
        plan = _plan(args)
        if args.table:
            if journal.plan is None:
                raise JournalError(f"no results in {args.out}")
            plan = Plan(**{**journal.plan, "concurrencies": tuple(journal.plan["concurrencies"])})
        else:
            journal.begin(plan.entry(), provenance(["sweep", *argv]))
            asyncio.run(_measure(plan, journal, args))
    except (AerieError, RuntimeError, ValueError, MalformedFile) as error:
        print(f"aerie bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"aerie bench: stopped; the same command goes on from {args.out}", file=sys.stderr)
        return 130
    table = Table(parse(plan.methods), journal.cells)
    print(table.text())
    _draw(table, plan, journal, args.out)
    return 0


def _draw(table: Table, plan: Plan, journal: Journal, out: Path) -> None:
    try:
        figure = figure_of(table)
    except NoPlots as error:
        _tell(f"no report: {error}")
        return
    files = save(figure, out)
    page = out.with_suffix(".html")
    page.write_text(html(table, plan.entry(), journal.provenance, svg(figure)), "utf-8")
    _tell("report: " + ", ".join(map(str, [page, *files])))


async def _measure(plan: Plan, journal: Journal, args: argparse.Namespace) -> None:
    methods = parse(plan.methods)
    logs = args.out.parent / f"{args.out.stem}-logs"
    attached = dict(pair.split("=", 1) for pair in args.attach)
    async with Fleet(methods, plan.settings, args.eagle3, logs, _tell, attached) as fleet:
        await sweep(plan, journal, fleet, _tell)


def _plan(args: argparse.Namespace) -> Plan:
    parse(args.methods)
    return Plan(
        workload=args.workload,
        chat=args.chat,
        methods=args.methods,
        concurrencies=tuple(int(c) for c in args.concurrency.split(",")),
        rounds=args.rounds,
        max_tokens=args.max_tokens,
        seconds=args.seconds,
        requests=args.requests,
        seed=args.seed,
        together=args.together if args.together is not None else not gpus(),
        settings=dict(_setting(pair) for pair in args.set),
    )


def _setting(pair: str) -> tuple[str, Any]:
    name, equals, text = pair.partition("=")
    if not equals:
        raise ValueError(f"--set {pair!r}: give NAME=VALUE")
    try:
        return name.replace("-", "_"), json.loads(text)
    except ValueError:
        return name.replace("-", "_"), text


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Of the options."""
    made = argparse.ArgumentParser(
        prog="aerie bench sweep", description=f"{__doc__}\n\n{methods_module.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = made.add_argument
    add("--methods", default=DEFAULT, help=f"[{DEFAULT}]")
    add("--concurrency", default=CONCURRENCIES, metavar="C,C", help=f"[{CONCURRENCIES}]")
    add("--workload", default="mixed",
        help="completion, chat, edit, summarise, mixed, or a file of HumanEval, MT-Bench, "
        "SPEED-Bench or JSON lines with prompt or messages [mixed]")  # fmt: skip
    add("--chat", action="store_true", help="ask a file's plain prompts as a user's message")
    add("--rounds", type=int, default=3, help="runs of each cell [3]")
    add("--seconds", type=float, default=10.0, metavar="S",
        help="of a cell, about; its requests are counted once, for all methods [10]")  # fmt: skip
    add("--requests", type=int, metavar="N", help="N requests per user instead")
    add("--max-tokens", type=int, default=128, help="tokens of every answer [128]")
    add("--seed", type=int, default=SEED, help=f"of prompts and order [{SEED}]")
    add("--together", action=argparse.BooleanOptionalAction, default=None,
        help="all servers at once, rounds over all of them (default where there is no GPU), or "
        "one after the other")  # fmt: skip
    add("--set", action="append", default=[], metavar="NAME=VALUE",
        help="a setting of the engines, as of `aerie serve`; again for more")  # fmt: skip
    add("--eagle3", default=EAGLE3, metavar="HEAD", help="EAGLE-3 head [of the embedded model]")
    add("--attach", action="append", default=[], metavar="SERVER=URL",
        help="use a server that runs already, like gateway=http://127.0.0.1:8000")  # fmt: skip
    add("--out", type=Path, default=Path("runs/sweep.jsonl"), metavar="FILE",
        help="results; the same command goes on from there [runs/sweep.jsonl]")  # fmt: skip
    add("--table", action="store_true", help="only print the table of --out")
    return made
