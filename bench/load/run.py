"""One run of load against one server, and its figures."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.load.arrivals import closed_loop, open_loop
from bench.load.client import Client, Job, Record
from bench.load.counters import PATH, Counters, speculation
from bench.load.events import outcome
from bench.load.figures import figures, steady, steady_arrivals

SPECULATION = "/v1/speculation"  # the gateway's path for state and objective


async def measure(
    client: Client,
    jobs: Sequence[Job],
    *,
    limits: Sequence[int] | None = None,
    times: Sequence[float] | None = None,
    started: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Send all jobs, in a closed loop with `limits` or an open loop at `times`; returns figures.

    The server's counters are read before and after. `started` is called with the index of each
    request of a closed loop as it is sent.
    """
    if (limits is None) == (times is None):
        raise ValueError("give limits or times")

    async def send(index: int) -> Record:
        return await client.stream(jobs[index])

    before = await counters(client)
    cpu, wall = _cpu(), time.perf_counter()
    if limits is not None:
        records = await closed_loop(send, limits, started)
    else:
        records = await open_loop(send, times or ())
    cpu, wall = _cpu() - cpu, time.perf_counter() - wall
    outcomes = [outcome(record) for record in records]
    found = figures(outcomes)
    if limits is None:
        found |= steady_arrivals(outcomes)
    elif len(set(limits)) == 1:
        found |= steady(outcomes, limits[0])
    found["client_cpu"] = round(cpu / wall, 4)  # share of one core that this process used
    if before is not None:
        after = await counters(client)
        if after is not None:
            found |= speculation(after.since(before))
    return found


async def counters(client: Client) -> Counters | None:
    """The server's counters now; None if it has none."""
    # The gateway's page has the policy's counters of up to a second ago; this refreshes them.
    await client.text(SPECULATION)
    page = await client.text(PATH)
    return None if page is None else Counters.read(page)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
