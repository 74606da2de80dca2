"""`aerie bench trace`: adaptive K against every fixed K on one gateway, under a moving load.

    steps   1, 4, 16, 48, 16, 4, 1 users
    burst   1 user, then 48 at once, then 1
    visits  1, 8, 2, 16, 1 users: for long contexts, with --context

Every stage has a fixed number of requests, so that all methods do the same work, and the time for
all of it is compared. PATCH /v1/speculation switches between methods.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import options
from bench.errors import reports_errors
from bench.load.intervals import over_best, speed
from bench.load.run import measure
from bench.options import add_attach, add_context, add_settings, add_work, tell
from bench.parser import command_parser
from bench.provenance import provenance
from bench.sweep.cells import Work, takes_ignore_eos
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal
from bench.sweep.plots import NoPlots
from bench.systems.method import GATEWAY, Method, parse
from bench.trace.drawing import draw
from bench.trace.stages import limits, stages
from bench.trace.watch import watched
from bench.workloads.load import load_prompts
from drafters.markdown import columns
from drafters.train.number_options import positive_int

METHODS = "off,k:1,k:3,k:5,k:7,adaptive"
TRACES = "steps,burst"
PROMPTS, WARM_UP = 1024, 8


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure what has no results yet, print the ratios; returns the exit code."""
    args = _parser().parse_args(argv)
    journal = Journal(args.out)
    if args.table:
        plan = journal.recorded_plan()
        if "traces" not in plan:
            raise journal.of_another_command()
        print("\n".join(report(plan["traces"], parse(plan["methods"]), journal)))
        return 0
    methods = parse(args.methods)
    if others := [m.name for m in methods if m.server != GATEWAY]:
        raise ValueError(f"methods of one gateway only, not {', '.join(others)}")
    names = args.traces.split(",")
    for name in names:
        stages(name, 1)
    plan = {
        "traces": names, "methods": args.methods, "requests": args.requests,
        "repeats": args.repeats, "workload": args.workload, "chat": args.chat,
        "max_tokens": args.max_tokens, "spread": args.spread, "seed": args.seed,
        "context": args.context, "settings": options.settings(args.set),
        "attached": options.attached(args.attach, [GATEWAY]), "environment": options.environment(),
    }  # fmt: skip
    journal.begin(plan, provenance(["trace", *argv]))
    asyncio.run(_measure(args, plan, methods, journal))
    print("\n".join(report(names, methods, journal)))
    _draw(names, methods, journal, args.out)
    return 0


async def _measure(
    args: argparse.Namespace, plan: dict[str, Any], methods: list[Method], journal: Journal
) -> None:
    logs = args.out.parent / f"{args.out.stem}-logs"
    prompts = load_prompts(
        args.workload, PROMPTS, chat=args.chat, seed=args.seed, context=args.context
    )
    shared = (methods, plan["settings"], options.EAGLE3, logs, tell, plan["attached"])
    async with Fleet(*shared) as fleet:
        asked: set[str] = set()  # servers that give answers the length asked for
        for number in range(args.repeats):
            for name in plan["traces"]:
                order = list(methods)
                random.Random(f"{args.seed}:{name}:{number}").shuffle(order)
                for method in order:
                    if (method.name, name, number) in journal.cells:
                        continue
                    client = await fleet.switch(method)
                    model = await fleet.model_of(method)
                    fields = method.cache_fields(name, number)
                    work = Work(prompts, model, args.max_tokens, True, args.spread, fields)
                    if method.server not in asked and not await takes_ignore_eos(client, work):
                        raise RuntimeError("the server refuses ignore_eos: work is not equal")
                    asked.add(method.server)
                    await _one(journal, client, work, method, name, number, args.requests)


async def _one(
    journal: Journal, client: Any, work: Work, method: Method, name: str, number: int, count: int
) -> None:
    trace = limits(stages(name, count))
    jobs = work.jobs(number * len(trace), len(trace))
    warm_up = work.jobs(number * len(trace) + len(trace), WARM_UP)
    await measure(client, warm_up, limits=[1] * WARM_UP)
    async with watched(client) as timeline:
        found = await measure(client, jobs, limits=trace)
    journal.add((method.name, name, number), {**found, "timeline": timeline})
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} requests failed: {found['failures'][0]}")
    tell(
        f"{name} {number} {method.label}: {found['seconds']:.1f} s, "
        f"{found['tokens_per_second']:.0f} tok/s, client {found['client_cpu']:.0%}"
    )


def report(names: Sequence[str], methods: Sequence[Method], journal: Journal) -> list[str]:
    """Tokens per second of each method on each trace, and adaptive K over the best fixed K."""
    rows = [["trace", *(m.label for m in methods), "best fixed", "adaptive / best", "95% interval"]]
    for name in names:
        speeds = {m: _speeds(journal, m, name) for m in methods}
        total = {m: speed(of, sorted(of)) for m, of in speeds.items() if of}
        row = [name, *(f"{total[m]:.0f}" if m in total else "" for m in methods)]
        fixed = [m for m in total if m.kind in ("off", "k")]
        adaptive = next((m for m in total if m.kind == "adaptive"), None)
        if adaptive is None or not fixed:
            rows.append([*row, "", "", ""])
            continue
        value, spread = over_best(speeds[adaptive], [speeds[m] for m in fixed])
        ends = " to ".join(f"{end:.3f}" for end in spread or ())
        best = max(fixed, key=lambda m, total=total: total[m])  # type: ignore[misc]
        rows.append([*row, best.label, f"{value:.3f}", ends])
    return ["Tokens per second over the whole trace, for the same requests:", *columns(rows)]


def _speeds(journal: Journal, method: Method, name: str) -> dict[int, float]:
    return {
        key[2]: cell["tokens_per_second"]
        for key, cell in journal.cells.items()
        if key[:2] == (method.name, name)
    }


def _draw(names: Sequence[str], methods: Sequence[Method], journal: Journal, out: Path) -> None:
    timelines: dict[str, Any] = {}
    seconds: dict[str, dict[str, float]] = {}
    for name in names:
        seconds[name] = {}
        for method in methods:
            runs = [c for key, c in journal.cells.items() if key[:2] == (method.name, name)]
            if runs:
                seconds[name][method.label] = sum(c["seconds"] for c in runs) / len(runs)
                if method.kind == "adaptive":
                    timelines[name] = runs[-1]["timeline"]
    try:
        tell("plots: " + ", ".join(map(str, draw(timelines, seconds, out))))
    except NoPlots as error:
        tell(f"no plots: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("trace", __doc__)
    add = parser.add_argument
    add("--methods", default=METHODS, help=f"[{METHODS}]")
    add("--traces", default=TRACES, help=f"[{TRACES}]")
    add("--requests", type=positive_int, default=24, help="of a stage, at least its users [24]")
    add("--repeats", type=positive_int, default=3, help="[3]")
    add_work(parser, max_tokens=64)
    add_context(parser)
    add_settings(parser)
    add_attach(parser)
    add("--out", type=Path, default=Path("runs/trace.jsonl"), metavar="FILE",
        help="results; the same command continues from there [runs/trace.jsonl]")  # fmt: skip
    add("--table", action="store_true", help="only print the table of --out")
    return parser
