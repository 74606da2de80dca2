"""One cell: a method at a concurrency in a round. And the order of all of them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.load.client import Client, Job
from bench.load.run import measure
from bench.systems.method import Method
from bench.workloads.prompt import Prompt

SETTLE_S = 0.5  # after a PATCH: it holds from the next step on, and a step is far shorter
WARM_UP_TOKENS = 32
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # its multiples modulo 1 leave no place empty for long


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked in every cell, the same for all methods."""

    prompts: Sequence[Prompt]
    model: str
    max_tokens: int
    ignore_eos: bool  # every answer has as many tokens as asked for: equal work
    spread: float = 0.0  # answers have `max_tokens` more or less this share of it
    fields: Mapping[str, Any] = field(default_factory=dict)  # of every request, beside the prompt

    def length(self, number: int) -> int:
        """Tokens of an answer: spread evenly, in no order, the same for the same prompt's number.

        Answers of one length end together where nothing is drafted, and the next prompts are read
        together; real ones do not.
        """
        place = 2.0 * (number * GOLDEN % 1.0) - 1.0
        return max(1, round(self.max_tokens * (1.0 + self.spread * place)))

    def jobs(self, first: int, count: int, max_tokens: int | None = None) -> list[Job]:
        """`count` requests from prompt `first` on, around the end of the list."""
        extra = {**self.fields, **({"ignore_eos": True} if self.ignore_eos else {})}
        return [
            self.prompts[number % len(self.prompts)].job(
                self.model, max_tokens or self.length(number), extra
            )
            for number in range(first, first + count)
        ]


def rounds(
    methods: Sequence[Method], count: int, seed: int, concurrency: int
) -> Iterator[tuple[int, Method]]:
    """(round, method): every method once a round, in an order that changes with the round."""
    for number in range(count):
        order = list(methods)
        random.Random(f"{seed}:{concurrency}:{number}").shuffle(order)
        for method in order:
            yield number, method


def hopeless(speeds: Mapping[Method, float], drop_below: float) -> set[Method]:
    """Methods with a K of their own that made less than this share of the fastest's tokens per
    second."""
    least = drop_below * max(speeds.values())
    return {method for method, found in speeds.items() if method.k and found < least}


async def run_cell(
    client: Client, work: Work, concurrency: int, requests: int, number: int
) -> dict[str, Any]:
    """Settle, warm up at this concurrency, measure. Prompts depend on the round alone.

    The warm-up is as wide as the cell: K adapts, caches and connections fill before the clock runs.
    """
    await asyncio.sleep(SETTLE_S)
    first = number * requests
    warm_up = work.jobs(first + requests, concurrency, min(WARM_UP_TOKENS, work.max_tokens))
    await measure(client, warm_up, limits=[concurrency] * concurrency)
    jobs = work.jobs(first, requests)
    return await measure(client, jobs, limits=[concurrency] * requests)


async def takes_ignore_eos(client: Client, work: Work) -> bool:
    """Whether the work wants `ignore_eos` and the server takes it: OpenAI's own API knows none.

    Raises RuntimeError if it does not answer without it either.
    """
    if not work.ignore_eos:
        return False
    for asked in (True, False):
        probe = replace(work, max_tokens=4, ignore_eos=asked, spread=0.0)
        found = await measure(client, probe.jobs(0, 1), limits=[1])
        if not found["failed"]:
            return asked
    raise RuntimeError(f"the server answers no request: {found['failures'][0]}")


async def requests_for(client: Client, work: Work, concurrency: int, seconds: float) -> int:
    """Requests that take about `seconds` at this concurrency, whole waves of `concurrency`."""
    count = max(8, concurrency)
    jobs = work.jobs(0, count)
    # Once for caches and compilation, once for the clock.
    await measure(client, jobs[:concurrency], limits=[concurrency] * concurrency)
    found = await measure(client, jobs, limits=[concurrency] * count)
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} of {count} requests failed: {found['failures'][0]}")
    waves = round(seconds * found["requests_per_second"] / concurrency)
    # In the last wave users leave one by one; there must be one that they all stay for.
    return max(2 if work.spread else 1, waves) * concurrency
