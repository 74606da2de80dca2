"""Methods of one gateway in turns of seconds, under a load that does not end meanwhile.

A machine that others use changes its pace within a minute. Cells that begin and end with their
requests must be long, and what is compared lies far apart; here the same users go on asking, and
what is compared is a few seconds apart. Tokens are those that the server counts (a chunk's number
of tokens depends on the method), so this takes a server with vLLM's counters.
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

# After a switch the drafter catches up, and the drafts before it are verified. Requests are those
# of the method before for as long as one lasts: where some draft and some do not, their prompts are
# not as many for each token as in a stay, and their text not as easy.
SETTLE_S = 0.5
GENERATED = "vllm:generation_tokens_total"


def add_turns(parser: argparse.ArgumentParser) -> None:
    """Options of a Plan whose cells may be turns."""
    parser.add_argument(
        "--switchback",
        action="store_true",
        help="turns of --seconds under one load that does not end, for methods of one gateway",
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=SETTLE_S,
        metavar="S",
        help="of a turn, before it counts; whether methods draft or not is compared fairly once "
        f"a request does not last longer [{SETTLE_S}]",
    )


class Users:
    """So many who ask again as soon as they are answered, until the end of the `async with`."""

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

    def begin(self, number: int) -> None:
        """From now on ask prompts from this number on: every method of a round the same ones."""
        self._numbers = count(number)

    async def _ask(self) -> None:
        while not self._failure:
            (job,) = self._work.jobs(next(self._numbers), 1)
            failure = outcome(await self._client.stream(job)).failure
            self._failure = self._failure or failure

    def check(self) -> None:
        """RuntimeError once a request has failed."""
        if self._failure:
            raise RuntimeError(f"a request failed: {self._failure}")


async def run_turn(client: Client, users: Users, seconds: float, settle: float) -> dict[str, Any]:
    """Settle, then count, for so many seconds each; figures as of a cell."""
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
