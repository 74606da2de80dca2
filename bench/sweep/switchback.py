"""Switchback: methods of one gateway alternate in turns of seconds, under one constant load.

A machine that others use changes its speed within a minute. Cells that begin and end with their
requests must be long, so that cells that are compared are far apart. Here the same users continue
through all turns, and turns that are compared are seconds apart. Tokens are counted by the server
(how many a chunk has depends on the method), which must have vLLM's counters.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import count
from typing import Any, Self

from bench.load.client import Client
from bench.load.counters import Counters, speculation
from bench.load.events import outcome
from bench.load.run import counters
from bench.sweep.cells import Work

# After a switch the drafter catches up, and earlier drafts are verified. For as long as a request
# lasts, running requests began under the method before: if one method drafts and the other does
# not, prompts per token and the difficulty of the text are not those of a method's own requests.
TURN_SETTLE_S = 0.5
GENERATED = "vllm:generation_tokens_total"


def add_turns(parser: argparse.ArgumentParser) -> None:
    """Add the options of a Plan whose cells may be turns."""
    parser.add_argument(
        "--switchback",
        action="store_true",
        help="alternate methods of one gateway in turns of --seconds under one constant load",
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=TURN_SETTLE_S,
        metavar="S",
        help="seconds of a turn before it counts; longer than a request, for a fair comparison of "
        f"a method that drafts with one that does not [{TURN_SETTLE_S}]",
    )


class Users:
    """Users who send the next request as soon as one is answered, during an `async with` block."""

    def __init__(self, client: Client, work: Work, users: int) -> None:
        self._client, self._work, self._users = client, work, users
        self._numbers = count()
        self._failure = ""

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.ensure_future(self._ask()) for _ in range(self._users)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self, work: Work, number: int) -> None:
        """Continue with the requests of `work`, and with prompts from `number` on, which are the
        same for all methods of a round."""
        self._work, self._numbers = work, count(number)

    async def _ask(self) -> None:
        while not self._failure:
            (job,) = self._work.jobs(next(self._numbers), 1)
            failure = outcome(await self._client.stream(job)).failure
            self._failure = self._failure or failure

    def check(self) -> None:
        """Raise RuntimeError if a request has failed."""
        if self._failure:
            raise RuntimeError(f"a request failed: {self._failure}")


async def run_turn(client: Client, users: Users, seconds: float, settle: float) -> dict[str, Any]:
    """Wait for `settle` seconds, then count for `seconds`; returns figures as for a cell. Raises
    RuntimeError if a request failed or no token was made."""
    await asyncio.sleep(settle)
    before, began = await _page(client)
    await asyncio.sleep(seconds)
    after, ended = await _page(client)
    users.check()
    grown, took = after.since(before), ended - began
    tokens = grown.get(GENERATED)
    if not tokens:
        raise RuntimeError(f"the server's {GENERATED} did not grow")
    return {
        "failed": 0,
        "seconds": round(took, 4),
        "tokens": int(tokens),
        "tokens_per_second": round(tokens / took, 2),
        **speculation(grown),
    }


async def _page(client: Client) -> tuple[Counters, float]:
    page = await counters(client)
    if page is None:
        raise RuntimeError("the server has no /metrics")
    return page, time.perf_counter()
