"""`aerie bench ablation`: policies for K take turns on one engine.

A policy is one of drafters/control/variants.py: `small`, `full`, `full` without one of its
mechanisms; beside them each fixed K and K = 0. Each keeps what it has learned between its windows.
The same command goes on where it was stopped; it may be stopped at any time, since every load has
had a round before any has two.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from app.errors import AerieError
from bench import options
from bench.ablation.plot import draw
from bench.ablation.run import Plan, ablate
from bench.ablation.table import Table
from bench.options import add_servers, positive, share, tell
from bench.provenance import provenance
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal, JournalError
from bench.sweep.plots import NoPlots
from bench.systems.method import GATEWAY, parse
from bench.trace.stages import stages
from bench.workloads.embedded import SEED
from bench.workloads.files import MalformedFile
from drafters.control.variants import NAMES, TURNS, VARIABLE

METHODS = ",".join(
    [*(f"policy:{name}" for name in NAMES), "off", *(f"k:{k}" for k in (1, 2, 3, 5))]
)
LOADS = "1,2,4,8,16,32,steps,burst"


def main(argv: Sequence[str]) -> int:
    """Measure what is missing, print the table; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        journal = Journal(args.out)
        if args.table:
            if journal.plan is None:
                raise JournalError(f"no results in {args.out}")
            lists = ("workloads", "loads")
            plan = Plan(**{**journal.plan, **{name: tuple(journal.plan[name]) for name in lists}})
        else:
            plan = _plan(args)
            left = plan.seconds_left(journal)
            windows = sum(key not in journal.cells for key in plan.windows())
            tell(f"about {left / 60:.0f} minutes for {windows} windows, the start included")
            if args.estimate:
                return 0
            journal.begin(plan.entry(), provenance(["ablation", *argv]))
            asyncio.run(_measure(plan, journal, args))
    except (AerieError, RuntimeError, ValueError, MalformedFile) as error:
        print(f"aerie bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"aerie bench: stopped; the same command goes on from {args.out}", file=sys.stderr)
        return 130
    table = Table(parse(plan.methods), journal.cells, args.over)
    print(table.text())
    try:
        tell("drawn: " + ", ".join(map(str, draw(table, args.out))))
    except NoPlots as error:
        tell(f"not drawn: {error}")
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    methods = parse(args.methods)
    if others := [m.name for m in methods if m.server != GATEWAY]:
        raise ValueError(f"methods of one gateway only, not {', '.join(others)}")
    known = {f"policy:{name}" for name in NAMES}
    if unknown := [m.name for m in methods if m.kind == "policy" and m.name not in known]:
        raise ValueError(f"no policy {unknown[0]}: {', '.join(sorted(known))}")
    loads = tuple(args.loads.split(","))
    for load in loads:
        if not load.isdigit() or int(load) < 1:
            stages(load, 1)
    return Plan(
        methods=args.methods, workloads=tuple(args.workloads.split(",")), loads=loads,
        rounds=args.rounds, seconds=args.seconds, settle=args.settle, requests=args.requests,
        max_tokens=args.max_tokens, spread=args.spread, seed=args.seed,
        settings=options.settings(args.set),
    )  # fmt: skip


async def _measure(plan: Plan, journal: Journal, args: argparse.Namespace) -> None:
    os.environ[VARIABLE] = TURNS  # of the gateway that is started, and its engine
    logs = args.out.parent / f"{args.out.stem}-logs"
    attached = options.attached(args.attach)
    async with Fleet(
        parse(plan.methods), plan.settings, args.eagle3, logs, tell, attached
    ) as fleet:
        await ablate(plan, journal, fleet, tell)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aerie bench ablation", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--methods", default=METHODS, help=f"[{METHODS}]")
    add("--workloads", default="humaneval,chat", help="[humaneval,chat]")
    add("--loads", default=LOADS, help=f"users, or a moving load: steps, burst [{LOADS}]")
    add("--rounds", type=positive, default=12, help="windows of each policy at each load [12]")
    add("--seconds", type=float, default=3.0, metavar="S", help="of a window [3]")
    add("--settle", type=float, default=1.0, metavar="S", help="before it, not counted [1]")
    add("--requests", type=positive, default=4, help="of each stage of a moving load [4]")
    add("--max-tokens", type=positive, default=96, help="of an answer [96]")
    add("--spread", type=share, default=0.5, metavar="SHARE",
        help="answers have --max-tokens more or less this share of it [0.5]")  # fmt: skip
    add("--seed", type=int, default=SEED, help=f"of prompts and order [{SEED}]")
    add("--over", default="policy:full", metavar="METHOD", help="the reference [policy:full]")
    add_servers(parser)
    add("--out", type=Path, default=Path("runs/ablation.jsonl"), metavar="FILE",
        help="results; the same command goes on from there [runs/ablation.jsonl]")  # fmt: skip
    add("--estimate", action="store_true", help="only say how long it would take")
    add("--table", action="store_true", help="only print the table of --out")
    return parser
