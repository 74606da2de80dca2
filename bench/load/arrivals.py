"""When requests are sent: by users who wait for answers, or by a clock that does not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def closed_loop(
    send: Callable[[int], Awaitable[T]],
    limits: Sequence[int],
    started: Callable[[int], None] | None = None,
) -> list[T]:
    """Request i is sent as soon as fewer than `limits[i]` are running; results in order.

    Equal limits are so many users who ask again at once. A list that changes is a moving load
    of a fixed amount of work: requests, not seconds, move it from stage to stage.
    """
    running: set[asyncio.Task[T]] = set()
    tasks: list[asyncio.Task[T]] = []
    for index, limit in enumerate(limits):
        while len(running) >= limit:
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if started is not None:
            started(index)
        task = asyncio.ensure_future(send(index))
        tasks.append(task)
        running.add(task)
    return list(await asyncio.gather(*tasks))


async def open_loop(send: Callable[[int], Awaitable[T]], times: Sequence[float]) -> list[T]:
    """Request i is sent `times[i]` seconds from now, whatever became of the others."""
    begun, tasks = time.perf_counter(), []
    for index, due in enumerate(times):
        wait = begun + due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(send(index)))
    return list(await asyncio.gather(*tasks))


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Times of `count` arrivals at `rate` a second; the same for the same seed."""
    if rate <= 0:
        raise ValueError(f"the rate of arrivals must be positive, not {rate}")
    rng, now, times = random.Random(f"arrivals:{seed}"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times
