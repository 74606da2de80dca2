"""Record K and load over time, from the gateway's state."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.load.client import Client
from bench.load.run import SPECULATION

EVERY_S = 0.25

Timeline = list[tuple[float, int, int]]  # seconds, requests in the engine, K


@asynccontextmanager
async def watched(client: Client) -> AsyncIterator[Timeline]:
    """Record the gateway's state every EVERY_S during the `async with` block, with every method
    alike."""
    timeline: Timeline = []
    begun = time.perf_counter()

    async def ask() -> None:
        while True:
            state = await client.json("GET", SPECULATION)
            timeline.append(
                (round(time.perf_counter() - begun, 3), int(state["requests"]), int(state["k"]))
            )
            await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(ask())
    try:
        yield timeline
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
