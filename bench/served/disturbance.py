"""`aerie bench disturbance`: does the gateway draft again once a busy machine is quiet?

A CPU engine shares its cores with whatever else runs there. The disturbance is one process that
computes without end. Two questions are answered:

    start      a gateway is started and calibrated beside that process, which then ends: after how
               many seconds of requests does it draft half as often as a gateway that was started
               on the quiet machine, with the same number of users?
    service    the quiet gateway serves requests for five minutes, with three disturbances of 20 s:
               what are the tokens per second between and after them, over those before the first?

In `start`, each number of users has a new gateway. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import options
from bench.errors import reports_errors
from bench.load.busy import busy_process
from bench.load.client import Client, Job
from bench.load.counters import Counters
from bench.load.run import counters
from bench.options import add_settings, add_work, tell
from bench.parser import command_parser
from bench.sweep.fleet import Fleet
from bench.systems.method import parse
from bench.workloads.load import load_prompts
from drafters.train.number_options import positive_int

EVERY_S = 0.5  # between two reads of the counters
WINDOW_S = 3.0  # window over which the share of steps with drafts is taken
AS_OFTEN = 0.5  # wanted share of steps with drafts, over that of the quiet gateway
WITHIN_S = 30.0
SERVICE_S = 300.0
DISTURBANCES = ((60.0, 80.0), (140.0, 160.0), (220.0, 240.0))  # begin and end
SETTLE_S = 10.0  # after requests begin, not counted
KEPT = 0.95


@dataclass(frozen=True)
class Look:
    """The server's counters at one moment."""

    at_s: float  # since the requests began
    tokens: float
    steps: float
    drafting: float  # steps that had drafts

    @classmethod
    def of(cls, at_s: float, counted: Counters) -> Look:
        """Read the counters that are needed from `counted`."""
        steps = counted.by("aerie_steps_total")
        total = sum(steps.values())
        tokens = counted.get("vllm:generation_tokens_total")
        return cls(at_s, tokens, total, total - steps.get(0, 0.0))


def drafting_share(looks: Sequence[Look], begin_s: float, end_s: float) -> float:
    """Share of the steps between two moments that had drafts; 0 where there were no steps."""
    within = [look for look in looks if begin_s <= look.at_s <= end_s]
    if len(within) < 2 or within[-1].steps == within[0].steps:
        return 0.0
    grown = within[-1].drafting - within[0].drafting
    return grown / (within[-1].steps - within[0].steps)


def drafts_after(looks: Sequence[Look], share: float) -> float | None:
    """Seconds of requests until at least `share` of the last `WINDOW_S` seconds' steps had drafts;
    None if that never happened."""
    for look in looks:
        if look.at_s >= WINDOW_S and (
            drafting_share(looks, look.at_s - WINDOW_S, look.at_s) >= share
        ):
            return look.at_s
    return None


def rate(looks: Sequence[Look], begin_s: float, end_s: float) -> float:
    """Tokens per second between two moments."""
    within = [look for look in looks if begin_s <= look.at_s <= end_s]
    return (within[-1].tokens - within[0].tokens) / (within[-1].at_s - within[0].at_s)


def quiet_stretches(
    disturbances: Sequence[tuple[float, float]], end_s: float
) -> list[tuple[float, float]]:
    """(begin, end) in seconds of the times before, between and after the disturbances."""
    begins = [SETTLE_S, *(end for _, end in disturbances)]
    return list(zip(begins, [*(begin for begin, _ in disturbances), end_s], strict=True))


@contextlib.asynccontextmanager
async def requests(client: Client, jobs: Sequence[Job], users: int) -> AsyncIterator[None]:
    """Run a closed loop of `users` during the `async with` block. Raises RuntimeError at its end if
    a request failed."""
    failures: list[str] = []

    async def one(user: int) -> None:
        for index in range(user, sys.maxsize, users):
            record = await client.stream(jobs[index % len(jobs)])
            if record.failure:
                failures.append(record.failure)
                return

    tasks = [asyncio.create_task(one(user)) for user in range(users)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failures:
        raise RuntimeError(f"a request failed: {failures[0]}")


async def look_for(
    client: Client, seconds: float, disturbances: Sequence[tuple[float, float]] = ()
) -> list[Look]:
    """Read the counters for `seconds`, and disturb the machine at the given times, (begin, end)."""
    looks: list[Look] = []
    with contextlib.ExitStack() as stack:
        waiting = list(disturbances)
        began, until = time.monotonic(), None
        while (now := time.monotonic() - began) < seconds:
            if until is not None and now >= until:
                stack.close()
                until = None
            if waiting and now >= waiting[0][0]:
                until = waiting.pop(0)[1]
                stack.enter_context(busy_process())
            counted = await counters(client)
            if counted is None:
                raise RuntimeError("the server has no metrics")
            looks.append(Look.of(time.monotonic() - began, counted))
            await asyncio.sleep(EVERY_S)
    return looks


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """Answer both questions, on gateways that are started for it."""
    method = parse("adaptive")[0]
    given = options.settings(args.set) | {"k": args.k}

    def fleet(name: str) -> Fleet:
        return Fleet([method], given, options.EAGLE3, args.logs / name, tell)

    def jobs(model: str) -> list[Job]:
        prompts = load_prompts(args.workload, 400, chat=args.chat, seed=args.seed)
        greedy = {"temperature": 0.0}
        return [prompt.job(model, args.max_tokens, greedy) for prompt in prompts]

    found: dict[str, object] = {}
    shares: dict[int, float] = {}
    async with fleet("quiet") as quiet:
        client = await quiet.client(method)
        for users in args.users:
            async with requests(client, jobs(quiet.model), users):
                looks = await look_for(client, WITHIN_S)
            shares[users] = drafting_share(looks, SETTLE_S, WITHIN_S)
            tell(f"{users} users, quiet: {shares[users]:.2f} of the steps draft")
        async with requests(client, jobs(quiet.model), args.service_users):
            looks = await look_for(client, SERVICE_S, DISTURBANCES)
        before, *others = (rate(looks, *s) for s in quiet_stretches(DISTURBANCES, SERVICE_S))
        kept = statistics.mean(others) / before
        busy = statistics.mean(rate(looks, *each) for each in DISTURBANCES) / before
        found["service"] = {
            "users": args.service_users, "tokens_per_second_before": round(before, 1),
            "between_and_after": [round(each / before, 3) for each in others],
            "kept": round(kept, 3), "disturbed": round(busy, 3), "wanted": KEPT,
        }  # fmt: skip
        tell(f"{args.service_users} users: {kept:.3f} kept, {busy:.3f} while disturbed")
    start: dict[str, object] = {}
    for users in args.users:
        async with fleet(f"disturbed-{users}") as disturbed:
            with busy_process():
                client = await disturbed.client(method)
            async with requests(client, jobs(disturbed.model), users):
                looks = await look_for(client, WITHIN_S + WINDOW_S)
        wanted = AS_OFTEN * shares[users]
        seconds = drafts_after(looks, wanted)
        start[str(users)] = {
            "quiet_share": round(shares[users], 3),
            "drafts_after_s": None if seconds is None else round(seconds, 1),
            "share_at_the_end": round(drafting_share(looks, WITHIN_S / 2, WITHIN_S), 3),
        }
        tell(f"{users} users, calibrated beside a busy process: {start[str(users)]}")
    return {"start": start, **found}


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    parser = command_parser("disturbance", __doc__)
    add = parser.add_argument
    add("--users", type=options.counts, default=(1, 4, 16), metavar="N,N",
        help="users of `start` [1,4,16]")  # fmt: skip
    add("--service-users", type=positive_int, default=4, help="users of `service` [4]")
    add("--k", type=positive_int, default=7, help="largest K of the gateway [7]")
    add_work(parser, spread=False)
    add_settings(parser)
    add("--logs", type=Path, default=Path("runs/disturbance-logs"), help="[runs/disturbance-logs]")
    args = parser.parse_args(argv)
    print(json.dumps(asyncio.run(measure(args))))
    return 0
