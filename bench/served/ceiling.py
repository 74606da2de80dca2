"""`aerie bench ceiling`: the client's own limit, measured against a server that answers at once.

Without a gap between events, a read gets many of them: the most that the client can take. With a
gap, each event is a read of its own, as from an engine, which shows what a chunk costs.

The client's CPU time per chunk, times the chunks per second of a real run, is the share of a core
that it takes from the engine. Every result has that share, measured, as `client_cpu`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.errors import reports_errors
from bench.load.client import Client, Job
from bench.load.run import measure
from bench.parser import command_parser
from bench.systems.server import Server, free_port

LOG = Path("runs/ceiling.log")
CHUNKS = 128  # an answer of 128 tokens, each in an event of its own


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure and print a line of JSON for each gap and concurrency; returns the exit code."""
    parser = command_parser("ceiling", __doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 128], metavar="C")
    parser.add_argument("--gaps-ms", type=float, nargs="+", default=[0, 10], metavar="MS")
    args = parser.parse_args(argv)
    for gap in args.gaps_ms:
        port = free_port()
        line = [sys.executable, "-m", "bench.load.null_server", str(port), str(CHUNKS)]
        server = Server([*line, str(gap / 1e3)], os.environ, port, LOG)
        try:
            server.wait("/health", 30)
            for concurrency in args.concurrency:
                count = concurrency * (2 if gap else max(1, 400 // concurrency))
                found = asyncio.run(_measure(server.url, concurrency, count))
                print(json.dumps({"gap_ms": gap, "concurrency": concurrency, **found}))
        finally:
            server.stop()
    return 0


async def _measure(url: str, concurrency: int, requests: int) -> dict[str, Any]:
    job = Job.of("/v1/completions", {"prompt": "x" * 600, "max_tokens": CHUNKS, "stream": True})
    async with Client(url) as client:
        await measure(client, [job], limits=[1])  # warm-up: what a process does only once
        found = await measure(client, [job] * requests, limits=[concurrency] * requests)
    if found["failed"]:
        raise RuntimeError(found["failures"][0])
    per_second = found["chunks"] / found["seconds"]
    return {
        "chunks_per_second": round(per_second),
        "requests_per_second": round(found["requests_per_second"]),
        "client_cpu": found["client_cpu"],
        "client_us_per_chunk": round(1e6 * found["client_cpu"] / per_second, 1),
    }
