"""`aerie bench sweep`: compare methods by concurrency, on engines that it starts and ends."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from bench import options
from bench.errors import reports_errors
from bench.options import add_context, add_servers, add_work, tell
from bench.parser import command_parser
from bench.provenance import gpus, provenance
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal
from bench.sweep.plots import NoPlots, figure_of, save, svg
from bench.sweep.report import APART, html
from bench.sweep.run import Plan, plan_of, sweep
from bench.sweep.switchback import add_turns
from bench.sweep.table import Table
from bench.systems import method as methods_module
from bench.systems.method import DEFAULT, parse, servers
from bench.systems.model_free import ARCHITECTURES
from bench.workloads.constraints import NAMED
from drafters.train.number_options import positive_int

CONCURRENCIES = "1,2,4,8,16,32,64,128"


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure what has no results yet, print the table; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        journal = Journal(args.out)
        if args.table:
            plan = plan_of(journal)
        else:
            plan = _plan(args)
            journal.begin(plan.entry(), provenance(["sweep", *argv]))
            asyncio.run(_measure(plan, journal, args))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command continues from {args.out}") from None
    methods = parse(plan.methods)
    table = Table(methods, journal.cells, plan.mean)
    print(table.text())
    if not plan.together and len(servers(methods)) > 1:
        print(f"\n{APART}")
    if not args.table:
        _draw(table, plan, journal, args.out)
    return 0


def _draw(table: Table, plan: Plan, journal: Journal, out: Path) -> None:
    try:
        figure = figure_of(table)
    except NoPlots as error:
        tell(f"no report: {error}")
        return
    files = save(figure, out)
    page = out.with_suffix(".html")
    page.write_text(html(table, plan.entry(), journal.provenance, svg(figure)), "utf-8")
    tell("report: " + ", ".join(map(str, [page, *files])))


async def _measure(plan: Plan, journal: Journal, args: argparse.Namespace) -> None:
    methods = parse(plan.methods)
    logs = args.out.parent / f"{args.out.stem}-logs"
    shared = (methods, plan.settings, args.eagle3, logs, tell, plan.attached, plan.model_free)
    async with Fleet(*shared) as fleet:
        await sweep(plan, journal, fleet, tell)


def _plan(args: argparse.Namespace) -> Plan:
    methods = parse(args.methods)
    if args.switchback and len(servers(methods)) > 1:
        raise ValueError("--switchback is for methods of one server")
    if args.switchback and args.cached_prompts:
        raise ValueError("--switchback has no --cached-prompts: its turns read new prompts")
    cache = {"enable_prefix_caching": True} if args.cached_prompts else {}
    return Plan(
        workload=args.workload,
        chat=args.chat,
        methods=args.methods,
        concurrencies=args.concurrency,
        rounds=args.rounds,
        max_tokens=args.max_tokens,
        spread=args.spread,
        seconds=args.seconds,
        requests=args.requests,
        seed=args.seed,
        together=args.together if args.together is not None else not gpus(),
        settings={**cache, **options.settings(args.set)},
        model_free=args.model_free,
        switchback=args.switchback,
        settle=args.settle,
        drop_below=args.drop_below,
        constraint=args.constraint,
        temperature=args.temperature,
        context=args.context,
        cached_prompts=args.cached_prompts,
        stop_at_eos=args.stop_at_eos,
        eagle3=options.head_name(args.eagle3),
        attached=options.attached(args.attach, servers(methods)),
        environment=options.environment(),
    )


def parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    made = command_parser("sweep", f"{__doc__}\n\n{methods_module.__doc__}")
    add = made.add_argument
    add("--methods", default=DEFAULT, help=f"[{DEFAULT}]")
    add("--concurrency", type=options.counts, default=options.counts(CONCURRENCIES), metavar="C,C",
        help=f"[{CONCURRENCIES}]")  # fmt: skip
    add("--rounds", type=positive_int, default=3, help="runs of each cell [3]")
    add("--drop-below", type=float, default=0.0, metavar="SHARE",
        help="after a sixth of the rounds, drop each fixed K that is slower than this share of the "
        "fastest method [0]")  # fmt: skip
    add_turns(made)
    add("--seconds", type=float, default=10.0, metavar="S",
        help="length of a cell, about; its requests are as many for all methods [10]")  # fmt: skip
    add("--requests", type=positive_int, metavar="N",
        help="requests of a cell per user, not --seconds")  # fmt: skip
    add_work(made)
    add_context(made)
    add("--cached-prompts", action="store_true",
        help="with the prefix cache, which has every prompt before its cell: for long contexts "
        "that requests share, as those of agents do")  # fmt: skip
    add("--constraint", default="", metavar="NAME",
        help=f"constraint of the answers: {', '.join(NAMED)}, or a JSON file with fields of the "
        "request; answers then end by themselves")  # fmt: skip
    add("--stop-at-eos", action="store_true", help="let the model end answers")
    add("--temperature", type=float, default=0.0, metavar="T",
        help="temperature of every request [0, greedy]")  # fmt: skip
    add("--together", action=argparse.BooleanOptionalAction, default=None,
        help="run all servers at once, with rounds over all of them (default without a GPU), or "
        "one after the other")  # fmt: skip
    add("--model-free", default="", metavar="ARCHITECTURE",
        help="without weights, with drafts accepted at random at published rates: "
        f"{', '.join(ARCHITECTURES)}")  # fmt: skip
    add_servers(made)
    add("--out", type=Path, default=Path("runs/sweep.jsonl"), metavar="FILE",
        help="results; the same command continues from there [runs/sweep.jsonl]")  # fmt: skip
    add("--table", action="store_true", help="only print the table of --out")
    return made
