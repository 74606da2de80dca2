"""`aerie bench answers`: the answers of several methods on one gateway: valid, equal, how fast?

    aerie bench answers --workload extraction --count 500 --methods off,adaptive
    aerie bench answers --workload tool-call --count 300 --methods off,k:5,adaptive \\
      --set tool_call_parser=hermes

Every method answers the same prompts, in blocks: a PATCH of /v1/speculation switches between the
methods of a block, in random order, so that the blocks that are compared are seconds apart.

    valid     answers that keep to the JSON schema of their request, or call a tool of it with
              arguments of its schema; `cut off` ones reached --max-tokens
    equal     answers with the same text and calls as the first method's. With --concurrency 1 only
              drafts change the shapes of passes, so that only float ties may differ; sampled
              answers (--temperature) have the seed of their prompt
    last gap  the longest time between two of the last eight events of an answer: a stall near
              its end

The exit code is 1 if an answer is not valid. Exits with the error if a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import options
from bench.errors import reports_errors
from bench.load.arrivals import closed_loop
from bench.load.client import Client, Record
from bench.load.counters import speculation
from bench.load.events import answer_message, outcome
from bench.load.figures import figures
from bench.load.run import counters
from bench.options import add_servers, add_work, tell
from bench.parser import command_parser
from bench.provenance import provenance
from bench.quality.answer_table import summaries, table
from bench.quality.validity import verdict
from bench.sweep.cells import CELL_SETTLE_S
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal
from bench.systems.method import Method, parse, servers
from bench.workloads.load import load_prompts
from bench.workloads.prompt import Prompt
from drafters.markdown import columns
from drafters.train.number_options import positive_int

METHODS = "off,adaptive"
LAST_EVENTS = 8


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Answer what has no results yet, print the table; returns the exit code."""
    args = _parser().parse_args(argv)
    methods = parse(args.methods)
    if len(servers(methods)) > 1:
        raise ValueError(f"methods of one gateway only, not {args.methods}")
    try:
        journal = Journal(args.out)
        plan = _plan(args, methods)
        journal.begin(plan, provenance(["answers", *argv]))
        asyncio.run(_measure(args, plan, methods, journal))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command continues from {args.out}") from None
    found = summaries(methods, journal.cells)
    print("\n".join(columns(table(methods, found))))
    print(json.dumps({"plan": journal.plan, "methods": found, "provenance": journal.provenance}))
    return 1 if any(each["invalid"] for each in found.values()) else 0


async def _measure(
    args: argparse.Namespace, plan: Mapping[str, Any], methods: Sequence[Method], journal: Journal
) -> None:
    """Run the blocks that the journal lacks. Raises RuntimeError if a request fails."""
    prompts = load_prompts(
        args.workload, args.count, chat=args.chat, seed=args.seed, constraint=args.constraint
    )
    logs = args.out.parent / f"{args.out.stem}-logs"
    shared = (methods, plan["settings"], args.eagle3, logs, tell, plan["attached"])
    async with Fleet(*shared) as fleet:
        for first in range(0, len(prompts), args.block):
            order = list(methods)
            random.Random(f"{args.seed}:{first}").shuffle(order)
            for method in order:
                if (method.name, first) in journal.cells:
                    continue
                client = await fleet.switch(method)
                await asyncio.sleep(CELL_SETTLE_S)
                block = prompts[first : first + args.block]
                model = await fleet.model_of(method)
                fields = {"temperature": args.temperature, **method.cache_fields()}
                cell = await _block(client, model, args, fields, first, block)
                journal.add((method.name, first), cell)
                if cell["failed"]:
                    raise RuntimeError(f"{cell['failed']} failed: {cell['failures'][0]}")
                tell(
                    f"prompts {first} to {first + len(block) - 1}, {method.label}: "
                    f"{cell['tokens_per_second']:.0f} tok/s"
                )


async def _block(
    client: Client,
    model: str,
    args: argparse.Namespace,
    fields: Mapping[str, Any],
    first: int,
    block: Sequence[Prompt],
) -> dict[str, Any]:
    """The figures of a load that answers a block, and what is to be said of each answer."""

    async def send(index: int) -> Record:
        seeded = {**fields, "seed": first + index}
        return await client.stream(block[index].job(model, args.max_tokens, seeded))

    before = await counters(client)
    records = await closed_loop(send, [args.concurrency] * len(block))
    after = await counters(client)
    found = figures([outcome(record) for record in records])
    if before is not None and after is not None:
        found |= speculation(after.since(before))
    answers = [_answer(prompt, record) for prompt, record in zip(block, records, strict=True)]
    return {**found, "answers": answers}


def _answer(prompt: Prompt, record: Record) -> dict[str, Any]:
    timed, said = outcome(record), answer_message(record)
    gaps = timed.event_gaps
    return {
        **asdict(said),
        "verdict": verdict(prompt.extra_body, said),
        "tokens": timed.tokens,
        "seconds": round(timed.e2e, 4),
        "longest_gap": round(max(gaps, default=0.0), 4),
        "last_gap": round(max(gaps[-(LAST_EVENTS - 1) :], default=0.0), 4),
    }


def _plan(args: argparse.Namespace, methods: Sequence[Method]) -> Mapping[str, Any]:
    names = (
        *("workload", "chat", "constraint", "count", "methods", "max_tokens", "concurrency"),
        *("block", "seed", "temperature"),
    )
    return {name: getattr(args, name) for name in names} | {
        "settings": options.settings(args.set), "eagle3": options.head_name(args.eagle3),
        "attached": options.attached(args.attach, servers(methods)),
        "environment": options.environment(),
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("answers", __doc__, "The last line is JSON.")
    add = parser.add_argument
    add("--methods", default=METHODS, help=f"as in `aerie bench sweep` [{METHODS}]")
    add("--count", type=positive_int, default=100, metavar="N", help="number of prompts [100]")
    add("--block", type=positive_int, default=20, metavar="N",
        help="prompts that a method answers before the next one [20]")  # fmt: skip
    add("--concurrency", type=positive_int, default=1, metavar="C", help="prompts at a time [1]")
    add("--constraint", default="", metavar="NAME", help="as in `aerie bench sweep`")
    add("--temperature", type=float, default=0.0, metavar="T", help="[0, greedy]")
    add_work(parser, max_tokens=512, spread=False)
    add_servers(parser)
    add("--out", type=Path, default=Path("runs/answers.jsonl"), metavar="FILE",
        help="results; the same command continues from there [runs/answers.jsonl]")  # fmt: skip
    return parser
