"""A cell of a sweep, one method at one concurrency in one round, and the order of cells."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.load.client import Client, Job
from bench.load.run import measure
from bench.systems.method import Method, cache_salt
from bench.workloads.prompt import Prompt

CELL_SETTLE_S = 0.5  # after a PATCH, which takes effect in the next step; steps are far shorter
WARM_UP_TOKENS = 32
REFUSALS = ("HTTP 400", "HTTP 422")  # what a failure begins with if a field was refused
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # its multiples modulo 1 are evenly spread at any count


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of every cell, which are the same for all methods."""

    prompts: Sequence[Prompt]
    model: str
    max_tokens: int
    # Answers have exactly the length asked for, so that work is equal; unless they are constrained.
    ignore_eos: bool
    spread: float = 0.0  # answers differ from `max_tokens` by up to this share of it
    fields: Mapping[str, Any] = field(default_factory=dict)  # of every request, beside the prompt

    @property
    def lengths_are_exact(self) -> bool:
        """Whether every answer has exactly the length asked for."""
        return self.ignore_eos and not any(prompt.extra_body for prompt in self.prompts)

    def length(self, number: int) -> int:
        """Tokens of the answer to prompt `number`: evenly spread, in no order.

        Without drafts, answers of equal length would end together and the next prompts be read
        together, unlike real ones.
        """
        place = 2.0 * (number * GOLDEN % 1.0) - 1.0
        return max(1, round(self.max_tokens * (1.0 + self.spread * place)))

    def of(self, model: str, fields: Mapping[str, Any]) -> Work:
        """The same requests to a server's `model`, with further `fields`."""
        return replace(self, model=model, fields={**self.fields, **fields})

    def jobs(self, first: int, count: int, max_tokens: int | None = None) -> list[Job]:
        """`count` requests from prompt `first` on; after the last prompt comes the first."""
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
    """(round, method): every method once per round, in an order that changes with the round."""
    for number in range(count):
        order = list(methods)
        random.Random(f"{seed}:{concurrency}:{number}").shuffle(order)
        for method in order:
            yield number, method


def hopeless(speeds: Mapping[Method, float], drop_below: float) -> set[Method]:
    """Methods of a fixed K > 0 whose tokens per second in `speeds` are below a share `drop_below`
    (0 to 1) of the fastest method's, adaptive K included. Raises ValueError for no speeds."""
    least = drop_below * max(speeds.values())
    return {method for method, found in speeds.items() if method.k and found < least}


async def run_cell(
    client: Client, work: Work, concurrency: int, requests: int, number: int
) -> dict[str, Any]:
    """Settle, warm up at this concurrency, and measure. Prompts depend on the round `number` alone.

    The warm-up has the cell's concurrency, so that K has adapted, caches are filled and connections
    open before the clock runs.
    """
    await asyncio.sleep(CELL_SETTLE_S)
    first = number * requests
    warm_up = work.jobs(first + requests, concurrency, min(WARM_UP_TOKENS, work.max_tokens))
    await measure(client, warm_up, limits=[concurrency] * concurrency)
    jobs = work.jobs(first, requests)
    return await measure(client, jobs, limits=[concurrency] * requests)


async def takes_ignore_eos(client: Client, work: Work) -> bool:
    """Whether `work` has `ignore_eos` and the server accepts it; OpenAI's own API does not.

    Raises RuntimeError if the request fails otherwise, or without it too.
    """
    if not work.ignore_eos:
        return False
    if not await _refusal(client, work):
        return True
    if refusal := await _refusal(client, replace(work, ignore_eos=False)):
        raise RuntimeError(f"the server answers no request: {refusal}")
    return False


async def takes_cache_salt(client: Client, work: Work) -> bool:
    """Whether the server accepts `cache_salt`; OpenAI's own API does not. One that passes over
    unknown fields counts as if it did. Raises RuntimeError if the request fails otherwise."""
    return not await _refusal(client, work.of(work.model, cache_salt("probe")))


async def _refusal(client: Client, work: Work) -> str:
    """How the server refuses a short request of `work` as a bad one; empty if it answers it. Raises
    RuntimeError if the request fails otherwise: a busy or broken server refuses no field."""
    probe = replace(work, max_tokens=4, spread=0.0)
    found = await measure(client, probe.jobs(0, 1), limits=[1])
    if not found["failed"]:
        return ""
    failure = str(found["failures"][0])
    if not failure.startswith(REFUSALS):
        raise RuntimeError(f"the server answers no request: {failure}")
    return failure


async def requests_for(client: Client, work: Work, concurrency: int, seconds: float) -> int:
    """How many requests take about `seconds` at this concurrency, a multiple of `concurrency`.

    Raises RuntimeError if a request fails.
    """
    count = max(8, concurrency)
    jobs = work.jobs(0, count)
    # First for caches and compilation, then to be timed.
    await measure(client, jobs[:concurrency], limits=[concurrency] * concurrency)
    found = await measure(client, jobs, limits=[concurrency] * count)
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} of {count} requests failed: {found['failures'][0]}")
    waves = round(seconds * found["requests_per_second"] / concurrency)
    # In the last wave users leave one by one; there must be a wave in which all of them stay.
    return max(2 if work.spread else 1, waves) * concurrency
