"""`aerie bench quality`: are answers the same with drafts and without, and are they right?

Every HumanEval problem is answered twice by one gateway, greedily: with drafts, and with
`"speculation": {"enabled": false}`. Answers with the same tokens are equal. Where two answers
differ first, the log-probabilities of both tokens in the pass without drafts are compared. If
rounding can explain the difference it is a float tie, else a failure, with exit code 1.

A pass that verifies drafts has several tokens of a request, and a pass with several requests has
more tokens too. Sums of floats differ between passes of different shapes. With --concurrency 1, the
default, only drafts change shapes, and the two answers to a problem follow each other. With more,
answers also depend on which others were in their passes, so that more of them differ.

--run-code runs the answers against the problems' tests and adds pass@1 with 95% intervals
(Wilson), and how many problems pass with drafts alone and without drafts alone. That executes code
that a model wrote, in a process of its own with limits, which contains accidents but is not a
sandbox against malice. Without the option nothing is executed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench import options
from bench.errors import reports_errors
from bench.load.arrivals import closed_loop
from bench.load.client import KEY_VARIABLE, Client
from bench.load.counters import PATH, Counters, speculation
from bench.load.run import counters
from bench.options import EAGLE3, add_settings, tell
from bench.parser import command_parser
from bench.provenance import provenance
from bench.quality.answers import Answer, ask
from bench.quality.difference import TOLERANCE, difference
from bench.quality.extraction import program
from bench.quality.runner import run_program
from bench.quality.summary import summary, text
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal
from bench.systems.method import GATEWAY, Method, parse
from drafters.train.data.humaneval import Problem, problems
from drafters.train.number_options import positive_int

MAX_TOKENS = 512
_REPORT_EVERY = 15.0  # seconds


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Answer the problems that have no results yet, print the summary; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        method = _method(args.method)
        chosen = problems()[: args.count]
        journal = Journal(args.out)
        journal.begin(_plan(args), provenance(["quality", *argv]))
        asyncio.run(_measure(args, method, chosen, journal))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command continues from {args.out}") from None
    found = summary(journal.cells, args.tolerance)
    tell(text(found))
    starts = list(journal.counters.values())
    drafted = speculation(Counters.total(starts)) if starts else None
    facts = {"plan": journal.plan, "speculation": drafted, "provenance": journal.provenance}
    print(json.dumps({**found, **facts}, allow_nan=False))
    # Without drafts both answers come from the same passes, and their equality proves nothing.
    idle = sum("acceptance_length" not in speculation(Counters.total([start])) for start in starts)
    if idle:
        print(
            f"aerie bench: no comparison, because the server drafted nothing in {idle} of "
            f"{len(starts)} starts; answer the problems again with another --out",
            file=sys.stderr,
        )
        return 1
    return 1 if found["failures"] else 0


async def _measure(
    args: argparse.Namespace, method: Method, chosen: Sequence[Problem], journal: Journal
) -> None:
    """Answer the problems that the journal lacks. After each, what the server counted since this
    start is written too, so that a kill leaves no answers of which nobody knows whether drafts were
    made. Raises RuntimeError if the server has no counters."""
    missing = [problem for problem in chosen if (problem.task_id,) not in journal.cells]
    if not missing:
        return
    async with AsyncExitStack() as stack:
        client, model = await _server(args, method, stack)
        before = await _counters(client)
        told, reading = time.monotonic(), asyncio.Lock()

        async def one(index: int) -> None:
            nonlocal told
            problem = missing[index]
            cell = await _cell(client, model, problem, args.max_tokens, args.run_code)
            async with reading:  # so that the newest page is written last
                journal.count((await _counters(client)).since(before).entry())
            journal.add((problem.task_id,), cell)
            if time.monotonic() - told > _REPORT_EVERY:
                told = time.monotonic()
                tell(f"{len(journal.cells)} of {len(chosen)} problems")

        await closed_loop(one, [args.concurrency] * len(missing))


async def _counters(client: Client) -> Counters:
    page = await counters(client)
    if page is None:
        raise RuntimeError(f"the server has no {PATH}, which says whether anything is drafted")
    return page


async def _server(
    args: argparse.Namespace, method: Method, stack: AsyncExitStack
) -> tuple[Client, str]:
    """A client of the server at --url, whose settings are not changed, or of a gateway that is
    started; and the name of its model."""
    if args.url:
        client = Client.of_running_server(args.url)
        await stack.enter_async_context(client)
        return client, args.model or await client.first_model()
    logs = args.out.parent / f"{args.out.stem}-logs"
    fleet = Fleet([method], options.settings(args.set), EAGLE3, logs, tell)
    await stack.enter_async_context(fleet)
    return await fleet.switch(method), fleet.model


async def _cell(
    client: Client, model: str, problem: Problem, max_tokens: int, run_code: bool
) -> dict[str, Any]:
    """Both answers to one problem, where they differ first, and the outcomes of their programs."""
    answer = partial(ask, client, model, problem, max_tokens=max_tokens)
    on, off = await answer(drafts=True), await answer(drafts=False)
    parted = difference(on, off)
    outcomes: dict[str, dict[str, str]] = {"on": {}, "off": {}}
    if run_code:
        programs = [program(problem, side.text) for side in (on, off)]
        # Equal programs run once: the order of sets differs between processes.
        results = {source: await asyncio.to_thread(run_program, source) for source in {*programs}}
        for side, source in zip(outcomes, programs, strict=True):
            outcomes[side]["outcome"] = results[source]
    return {
        "on": {**_entry(on), **outcomes["on"]},
        "off": {**_entry(off), **outcomes["off"]},
        "difference": parted and asdict(parted),
    }


def _entry(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
    }


def _method(name: str) -> Method:
    methods = parse(name)
    if len(methods) != 1 or methods[0].server != GATEWAY or methods[0].kind == "off":
        raise ValueError(f"--method {name!r}: give adaptive or k:K")
    return methods[0]


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    names = ("count", "max_tokens", "concurrency", "run_code", "method", "url", "model")
    plan = {name: getattr(args, name) for name in names}
    settings = options.settings(args.set)
    environment = options.environment()
    return {"workload": "humaneval", **plan, "settings": settings, "environment": environment}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "quality",
        __doc__,
        f"An API key for --url is read from {KEY_VARIABLE}. The last line is JSON.",
    )
    add = parser.add_argument
    add("--url", default="", help="address of a running gateway; without it one is started")
    add("--model", default="", help="with --url [the server's first]")
    add("--method", default="adaptive", help="adaptive or k:K, if a gateway is started [adaptive]")
    add("--count", type=positive_int, metavar="N", help="only the first N problems [all]")
    add("--max-tokens", type=positive_int, default=MAX_TOKENS, help=f"of an answer [{MAX_TOKENS}]")
    add("--concurrency", type=positive_int, default=1, metavar="C", help="problems at a time [1]")
    add("--tolerance", type=float, default=TOLERANCE, metavar="NATS",
        help=f"largest gap of a float tie [{TOLERANCE}: two units in the last place of bfloat16 "
        "logits from 16 to 32; 0.001 is enough for float32]")  # fmt: skip
    add("--run-code", action="store_true", help="execute the answers, for pass@1")
    add_settings(parser)
    add("--out", type=Path, default=Path("runs/quality.jsonl"), metavar="FILE",
        help="results; the same command continues from there [runs/quality.jsonl]")  # fmt: skip
    return parser
