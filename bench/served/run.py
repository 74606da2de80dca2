"""`aerie bench run`: put load on running servers, any that speak OpenAI's API.

    aerie bench run --url http://127.0.0.1:8000 --concurrency 1,8,32
    aerie bench run --url a=http://host-a:8000 --url b=http://host-b:8000 --rate 5 --repeats 5

Several servers take turns, in random order in each repeat, on the same prompts. Each run, load and
repeat has a `cache_salt` of its own, so that no prompt is read already. Of a server that refuses it
the results say so (`"cache_salt": false`): its prefix cache may help it. Each result is a line of
JSON on standard output (or in --out); a table goes to standard error.

With --rate the table's tokens per second are those from when the first answer ended until the last
request was sent (`steady_tokens_per_second`), without the run's start and tail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.errors import reports_errors
from bench.load.arrivals import poisson
from bench.load.client import KEY_VARIABLE, Client
from bench.load.intervals import interval, ratio, speed
from bench.load.run import measure
from bench.options import add_work, counts, tell
from bench.parser import command_parser
from bench.provenance import provenance
from bench.sweep.cells import WARM_UP_TOKENS, Work, takes_cache_salt, takes_ignore_eos
from bench.sweep.table import pm
from bench.systems.method import cache_salt
from bench.workloads.load import label, load_prompts
from drafters.markdown import columns
from drafters.train.number_options import positive_int

ARRIVALS_S = 60.0  # of a run with --rate, about


class System(NamedTuple):
    """A server under load, and what it takes."""

    client: Client
    work: Work
    takes_salt: bool


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit code, 1 if a request failed."""
    args = _parser().parse_args(argv)
    if not args.rate and args.requests and args.requests < max(args.concurrency):
        raise ValueError(f"--requests {args.requests} is less than {max(args.concurrency)} users")
    servers = _servers(args.url)
    lines: list[dict[str, Any]] = []
    try:
        asyncio.run(_measure(args, list(argv), servers, lines))
    finally:
        if lines:
            tell("\n".join(columns(_table(lines, list(servers)))))
    return 1 if any(line["failed"] for line in lines) else 0


def _servers(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `--url` to name -> address, in the order given."""
    found = {}
    for number, pair in enumerate(pairs):
        name, _, url = pair.partition("=")
        if "://" in name or not url:  # no name was given: the `=` is in the address
            name, url = f"server {number + 1}", pair
        found[name] = url
    return found


async def _measure(
    args: argparse.Namespace, argv: list[str], servers: dict[str, str], lines: list[dict[str, Any]]
) -> None:
    """Add a line for each run to `lines`, and write it."""
    told = provenance(["run", *argv])
    async with AsyncExitStack() as stack:
        systems: dict[str, System] = {}
        for name, url in servers.items():
            client = await stack.enter_async_context(Client.of_running_server(url))
            work = await _work(args, client)
            systems[name] = System(client, work, await takes_cache_salt(client, work))
            if not systems[name].takes_salt:
                tell(f"{name} refuses cache_salt: its prefix cache may have prompts already")
        async for line in _cells(args, systems):
            lines.append(line)
            text = json.dumps({**line, "provenance": told})
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(text + "\n")
            else:
                print(text, flush=True)


async def _work(args: argparse.Namespace, client: Client) -> Work:
    model = args.model or await client.first_model()
    prompts = load_prompts(args.workload, args.prompts, chat=args.chat, seed=args.seed)
    work = Work(prompts, model, args.max_tokens, not args.stop_at_eos, args.spread)
    takes = work.ignore_eos and await takes_ignore_eos(client, work)
    return replace(work, ignore_eos=takes)


async def _cells(
    args: argparse.Namespace, systems: dict[str, System]
) -> AsyncIterator[dict[str, Any]]:
    loads = args.rate or args.concurrency
    for load in loads:
        count = args.requests or _requests(args, load)
        for number in range(args.repeats):
            order = list(systems)
            random.Random(f"{args.seed}:{load}:{number}").shuffle(order)
            for name in order:
                client, work, takes_salt = systems[name]
                if takes_salt:
                    work = work.of(work.model, cache_salt(name, load, number))
                try:
                    found = await _run(args, client, work, load, count, number)
                except RuntimeError as error:  # the server has ended: the others go on
                    found = {"requests": count, "failed": count, "failures": [str(error)]}
                kind = "rate" if args.rate else "concurrency"
                yield {
                    "system": name, "workload": label(args.workload), kind: load,
                    "repeat": number, **found, "ignore_eos": work.lengths_are_exact,
                    "cache_salt": takes_salt,
                }  # fmt: skip


def _requests(args: argparse.Namespace, load: float) -> int:
    """How many requests a run has if --requests does not say it."""
    users = round(load)
    if not args.rate:
        return max(8, 4 * users)
    # After the last prompt comes the first again, which a prefix cache would have.
    return max(8, min(round(ARRIVALS_S * load), args.prompts - users))


async def _run(
    args: argparse.Namespace, client: Client, work: Work, load: float, count: int, number: int
) -> dict[str, Any]:
    first = number * count
    users = min(count, max(1, round(load)))
    warm_up = work.jobs(first + count, users, min(WARM_UP_TOKENS, work.max_tokens))
    await measure(client, warm_up, limits=[users] * users)
    jobs = work.jobs(first, count)
    if args.rate:
        times = poisson(load, count, seed=args.seed + number)
        return await measure(client, jobs, times=times)
    return await measure(client, jobs, limits=[round(load)] * count)


def _table(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """A row for each system and load, with ratios over the first of the systems, `names`."""
    kind = "rate" if "rate" in lines[0] else "concurrency"
    figure = "steady_tokens_per_second" if kind == "rate" else "tokens_per_second"
    rows = [["system", kind, "tok/s", "over first", "per user", "TTFT ms", "TPOT ms", "p99 ITL ms",
             "acceptance", "K", "client CPU", "failed"]]  # fmt: skip
    speeds: dict[tuple[str, float], dict[int, float]] = {}
    for line in lines:
        of = speeds.setdefault((line["system"], line[kind]), {})
        if figure in line:
            of[line["repeat"]] = line[figure]
    for (name, load), of in speeds.items():
        mine = [x for x in lines if (x["system"], x[kind]) == (name, load)]
        first = speeds.get((names[0], load), {})
        total = over = ""
        if of:
            total = pm(speed(of, sorted(of)), interval(sorted(of), partial(speed, of)), ".0f")
        if name != names[0] and set(of) & set(first):
            over = pm(*ratio(of, first), ".3f")
        figures = [
            _mean(mine, "user_tokens_per_second", form=".0f"), _mean(mine, "ttft_ms", "p50"),
            _mean(mine, "tpot_ms", "p50"), _mean(mine, "itl_ms", "p99"),
            _mean(mine, "acceptance_length", form=".2f"), _mean(mine, "k_mean", form=".2f"),
            _mean(mine, "client_cpu", form=".1%"), _failed(mine),
        ]  # fmt: skip
        rows.append([name, f"{load:g}", total, over, *figures])
    return rows


def _failed(lines: Sequence[dict[str, Any]]) -> str:
    """How many requests of the lines failed, and in how many of the repeats."""
    failed = [line["failed"] for line in lines if line["failed"]]
    return f"{sum(failed)} in {len(failed)} of {len(lines)} repeats" if failed else "0"


def _mean(lines: Sequence[dict[str, Any]], *path: str, form: str = ".1f") -> str:
    values = []
    for line in lines:
        value: Any = line
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            values.append(value)
    return format(sum(values) / len(values), form) if values else ""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("run", __doc__, f"An API key is read from {KEY_VARIABLE}.")
    add = parser.add_argument
    add("--url", action="append", required=True, metavar="[NAME=]URL",
        help="address of a server; may be repeated")  # fmt: skip
    add("--model", help="[the server's first]")
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument("--concurrency", type=counts, default=(1, 8), metavar="C,C", help="[1,8]")
    loads.add_argument("--rate", type=_rates, metavar="R,R", help="requests per second, Poisson")
    add("--requests", type=positive_int,
        help="of a run, at least as many as users [4 for each user, "
        f"with --rate those of {ARRIVALS_S:g} s if --prompts are as many; at least 8]")  # fmt: skip
    add("--repeats", type=positive_int, default=3, help="[3]")
    add("--prompts", type=positive_int, default=1024, help="number of different prompts [1024]")
    add("--stop-at-eos", action="store_true", help="let the model end answers")
    add_work(parser)
    add("--out", type=Path, metavar="FILE", help="append results to this file instead of stdout")
    return parser


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"rates must be positive: {text!r}")
    return rates
