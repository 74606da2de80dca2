"""When requests are sent: by users who wait for answers (closed loop), or at times (open loop)."""

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
    """Send request i as soon as fewer than `limits[i]` are running; returns results in order.

    Equal limits stand for as many users, who send the next request when one is answered. Limits
    that change are a moving load with a fixed amount of work: it moves on by requests, not by time.
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
    """Send request i `times[i]` seconds from now, independently of others; results in order."""
    begun, tasks = time.perf_counter(), []
    for index, due in enumerate(times):
        wait = begun + due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(send(index)))
    return list(await asyncio.gather(*tasks))


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Times in seconds of `count` Poisson arrivals at `rate` per second, by `seed`. Raises
    ValueError unless the rate is positive."""
    if rate <= 0:
        raise ValueError(f"the rate of arrivals must be positive, not {rate}")
    rng, now, times = random.Random(f"arrivals:{seed}"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times
