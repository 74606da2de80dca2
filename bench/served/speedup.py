"""`aerie bench speedup`: is the gateway's own speed-up gauge right?

The gauge, over the window of a run with adaptive K, is
rate(aerie_decode_seconds_without_drafts_total) / rate(aerie_decode_seconds_total): an estimate of
the time that the same tokens would have taken without drafts, made while drafting. Here the same
prompts are run with drafts on and off in turn, and the gauge is compared with the ratio of the two:

    measured   tokens per second on / off, as a client sees it
    decode     seconds of steps per token off / on, by the engine's count: what the gauge estimates

With --switchback, on and off alternate under one load, which a noisy machine disturbs less. Turns
that are shorter than a request compare different work (bench/LOG.md, 2026-11-25).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import options
from bench.errors import reports_errors
from bench.load.intervals import Mean, interval, of_equal_work, ratio
from bench.options import add_attach, add_settings, add_work, tell
from bench.parser import command_parser
from bench.provenance import provenance
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal
from bench.sweep.run import Plan, plan_of, sweep
from bench.sweep.switchback import add_turns
from bench.sweep.table import pm
from bench.systems.method import GATEWAY, parse
from drafters.markdown import columns
from drafters.train.number_options import positive_int

ON, OFF = "adaptive", "off"
Cells = Mapping[tuple[Any, ...], Mapping[str, Any]]


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure what has no results yet, print the comparison; returns the exit code."""
    args = _parser().parse_args(argv)
    journal = Journal(args.out)
    if args.table:
        plan = plan_of(journal)
    else:
        plan = _plan(args)
        journal.begin(plan.entry(), provenance(["speedup", *argv]))
        asyncio.run(_measure(plan, journal, args))
    print("\n".join(columns(rows(journal.cells, plan.mean))))
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    return Plan(
        workload=args.workload, chat=args.chat, methods=f"{OFF},{ON}",
        concurrencies=args.concurrency, rounds=args.rounds, max_tokens=args.max_tokens,
        spread=args.spread, seconds=args.seconds, requests=None, seed=args.seed, together=True,
        settings=options.settings(args.set) | {"k": args.k}, switchback=args.switchback,
        settle=args.settle, attached=options.attached(args.attach, [GATEWAY]),
        environment=options.environment(),
    )  # fmt: skip


def rows(cells: Cells, mean: Mean = of_equal_work) -> list[list[str]]:
    """A row for each concurrency: the gauge, the measured ratios, and the gauge's error."""
    found = [["c", "gauge", "measured on / off", "gauge is off by", "decode on / off", "off by"]]
    for c in sorted({key[1] for key in cells}):
        on, off = ({k[2]: cell for k, cell in cells.items() if k[:2] == (n, c)} for n in (ON, OFF))
        numbers = sorted(n for n in set(on) & set(off) if "gauge" in on[n])
        if not numbers:
            continue
        speeds = [{n: side[n]["tokens_per_second"] for n in numbers} for side in (on, off)]
        costs = [
            {n: side[n]["tokens"] / side[n]["decode_seconds"] for n in numbers}
            for side in (on, off)
        ]

        def gauge(chosen: Sequence[int], on: Any = on) -> float:
            decode = sum(on[n]["decode_seconds"] for n in chosen)
            return float(sum(on[n]["gauge"] * on[n]["decode_seconds"] for n in chosen)) / decode

        value = gauge(numbers)
        (measured, spread), (decode, narrow) = (ratio(*x, mean=mean) for x in (speeds, costs))
        found.append([
            str(c), pm(value, interval(numbers, gauge), ".3f"), pm(measured, spread, ".3f"),
            f"{value / measured - 1:+.1%}", pm(decode, narrow, ".3f"), f"{value / decode - 1:+.1%}",
        ])  # fmt: skip
    return found


async def _measure(plan: Plan, journal: Journal, args: argparse.Namespace) -> None:
    logs = args.out.parent / f"{args.out.stem}-logs"
    shared = (parse(plan.methods), plan.settings, options.EAGLE3, logs, tell, plan.attached)
    async with Fleet(*shared) as fleet:
        await sweep(plan, journal, fleet, tell)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("speedup", __doc__)
    add = parser.add_argument
    add("--concurrency", type=options.counts, default=(1, 8, 32), metavar="C,C", help="[1,8,32]")
    add("--k", type=positive_int, default=7, help="largest K of the gateway [7]")
    add("--rounds", type=positive_int, default=5, help="[5]")
    add("--seconds", type=float, default=15.0, metavar="S", help="of a run, about [15]")
    add_turns(parser)
    add_work(parser)
    add_settings(parser)
    add_attach(parser)
    add("--out", type=Path, default=Path("runs/speedup.jsonl"), metavar="FILE",
        help="results; the same command continues from there [runs/speedup.jsonl]")  # fmt: skip
    add("--table", action="store_true", help="only print the table of --out")
    return parser
