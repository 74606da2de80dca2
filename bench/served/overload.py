"""`aerie bench overload`: how does a gateway do at four times the load that it can take?

    aerie bench overload --seconds 300

Starts a gateway (or uses the one at `--port`) and measures three phases. `peak` is a closed loop
that keeps every slot of the engine busy and the admission queue half full: it gives the peak
goodput, and the rate of requests at it. `capacity` is an open loop (Poisson) at that rate,
`overload` an open loop at `--times` that rate. Wanted are a goodput of 0.95 of the peak or more, a
p99 TTFT of accepted requests of at most twice that at capacity, and rejections in less than 50 ms.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from urllib.request import ProxyHandler, build_opener

from bench.errors import reports_errors
from bench.load.client import KEY_VARIABLE, Client
from bench.parser import command_parser
from bench.systems.server import Server, free_port

READY_WITHIN_S = 300.0
_LOCAL = build_opener(ProxyHandler({}))  # a proxy in the environment is for other machines
SETTLE_S = 5.0  # at the beginning of each phase, not counted
WANTED = {"goodput": 0.95, "ttft": 2.0, "refusal_s": 0.050}
LOG = Path("runs/overload.log")


@dataclass
class OverloadOutcome:
    """One request: its status, tokens, and times in seconds of time.monotonic(); `first_s` is the
    time to the first token."""

    at: float
    status: int = 0
    first_s: float = 0.0
    ended: float = 0.0
    tokens: int = 0

    @property
    def whole(self) -> bool:
        """Whether the request was accepted and answered to the end."""
        return self.status == 200 and self.tokens > 0


class Lag:
    """How late this process's own event loop is, which is added to every time that it measures."""

    EVERY_S = 0.01

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []

    async def watch(self) -> None:
        """Record every EVERY_S how late the event loop is, until cancelled."""
        while True:
            due = time.monotonic() + self.EVERY_S
            await asyncio.sleep(self.EVERY_S)
            self._late.append((due, time.monotonic() - due))

    def p99_s(self, begin: float, end: float) -> float:
        """99th percentile of the lateness between two moments, in seconds."""
        return _p99(sorted(late for due, late in self._late if begin <= due < end))


class OverloadClient:
    """Streams completions, each over a connection of its own, and parses only what is needed."""

    def __init__(self, port: int, model: str, tokens: int, seed: int) -> None:
        self._port = port
        self._model = model
        key = os.environ.get(KEY_VARIABLE, "")
        self._key_header = f"Authorization: Bearer {key}\r\n" if key else ""
        self._tokens = tokens
        self._random = Random(seed)
        self.outcomes: list[OverloadOutcome] = []

    async def ask(self) -> None:
        """Send one request and record its outcome."""
        # Answers of equal length would end together, and waiting requests would wait for them all.
        tokens = self._random.randint(self._tokens // 2, self._tokens * 3 // 2)
        body = json.dumps(
            {
                "model": self._model,
                "prompt": f"# {self._random.randrange(10**6)}\ndef step(value):\n",
                "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()  # fmt: skip
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"{self._key_header}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        outcome = OverloadOutcome(at=time.monotonic())
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(head.encode() + body)
                await self._read(reader, outcome)
            finally:
                writer.close()
        except OSError:
            outcome.status = 0
        outcome.ended = time.monotonic()
        self.outcomes.append(outcome)

    async def _read(self, reader: asyncio.StreamReader, outcome: OverloadOutcome) -> None:
        status = (await reader.readline()).split()[1:2]
        if not status:
            raise ConnectionError("closed before an answer")
        outcome.status = int(status[0])
        last = b""
        while data := await reader.read(2**16):
            if not outcome.first_s and b"data: " in data:
                outcome.first_s = time.monotonic() - outcome.at
            last = (last + data)[-4096:]
        _, named, usage = last.rpartition(b'"completion_tokens":')
        if outcome.status == 200 and b"[DONE]" in last and named:  # else it ended with an error
            outcome.tokens = int(usage.split(b"}")[0].split(b",")[0])

    async def closed(self, clients: int, seconds: float) -> None:
        """A closed loop: `clients` that each send the next request when the last has ended."""
        end = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < end:
                await self.ask()

        await asyncio.gather(*(one() for _ in range(clients)))

    async def open(self, rate: float, seconds: float) -> None:
        """An open loop: `rate` requests per second (Poisson), whether or not others have ended."""
        end = time.monotonic() + seconds
        due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while due < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(self.ask())
                due += self._random.expovariate(rate)


def figures(outcomes: Sequence[OverloadOutcome], begin: float, end: float) -> dict[str, float]:
    """Rates of requests that ended, and times of those that began, between two moments."""
    ended = [o for o in outcomes if begin <= o.ended < end]
    begun = [o for o in outcomes if begin <= o.at < end]
    whole = [o for o in ended if o.whole]
    first = sorted(o.first_s for o in begun if o.whole)
    refused = sorted(o.ended - o.at for o in begun if o.status == 429)
    statuses = Counter(o.status for o in begun)
    return {
        "offered_per_s": len(begun) / (end - begin),
        "answered_per_s": len(whole) / (end - begin),
        "goodput": sum(o.tokens for o in whole) / (end - begin),
        "ttft_p50_s": median(first) if first else 0.0,
        "ttft_p99_s": _p99(first),
        "refused": statuses[429],
        "refusal_p50_s": median(refused) if refused else 0.0,
        "refusal_p99_s": _p99(refused),
        "other": sum(n for status, n in statuses.items() if status not in (200, 429)),
        "broken": sum(o.status == 200 and not o.whole for o in ended),
    }


def _p99(values: Sequence[float]) -> float:
    return values[min(len(values) - 1, int(0.99 * len(values)))] if values else 0.0


async def measure(port: int, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the three phases, one after another."""
    # Without waiting requests, slots stay empty for a moment whenever an answer ends, so that an
    # overload would make more tokens than the "peak".
    clients = arguments.places * 3 // 2
    async with Client.of_running_server(f"http://127.0.0.1:{port}") as listing:
        model = await listing.first_model()
    found: dict[str, dict[str, float]] = {}

    async def phase(name: str, seconds: float, rate: float | None) -> None:
        client = OverloadClient(port, model, arguments.tokens, arguments.seed)
        lag = Lag()
        watching = asyncio.create_task(lag.watch())
        began = time.monotonic() + SETTLE_S
        if rate is None:
            await client.closed(clients, seconds + SETTLE_S)
        else:
            await client.open(rate, seconds + SETTLE_S)
        watching.cancel()
        found[name] = figures(client.outcomes, began, began + seconds)
        found[name]["client_lag_p99_s"] = lag.p99_s(began, began + seconds)
        row = "  ".join(f"{key} {value:.3f}" for key, value in found[name].items())
        print(f"{name}: {row}", flush=True)
        if not found[name]["answered_per_s"]:
            raise RuntimeError(f"no request of `{name}` was answered; {common_status(client)}")
        await asyncio.sleep(2)

    await phase("peak", arguments.capacity_seconds, None)
    rate = found["peak"]["answered_per_s"]
    await phase("capacity", arguments.capacity_seconds, rate)
    await phase("overload", arguments.seconds, arguments.times * rate)
    return found


def common_status(client: OverloadClient) -> str:
    """The most frequent status of a client's requests, as text."""
    ((status, count),) = Counter(each.status for each in client.outcomes).most_common(1)
    name = f"status {status}" if status else "no answer"
    return f"{count} of {len(client.outcomes)} requests had {name}"


@contextmanager
def gateway(arguments: argparse.Namespace) -> Iterator[int]:
    """Start a gateway, yield its port when it is ready, and end it. Raises ServerError if it does
    not become ready."""
    port = free_port()
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port)]
    command += ["--preset", "embedded", "--max-num-seqs", str(arguments.batch), *arguments.serve]
    server = Server(command, os.environ, port, LOG)
    try:
        server.wait("/readyz", READY_WITHIN_S)
        yield port
    finally:
        server.stop()


def _ready(port: int) -> bool:
    try:
        with _LOCAL.open(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:  # urllib's error for a 503 is one too
        return False


def verdict(found: dict[str, dict[str, float]]) -> dict[str, float | bool]:
    """The three figures that are wanted, and whether each is as wanted."""
    overload = found["overload"]
    goodput = overload["goodput"] / max(phase["goodput"] for phase in found.values())
    ttft = overload["ttft_p99_s"] / found["capacity"]["ttft_p99_s"]
    refusal = overload["refusal_p99_s"]
    return {
        "goodput_of_peak": goodput,
        "ttft_p99_over_capacity": ttft,
        "refusal_p99_s": refusal,
        "goodput_ok": goodput >= WANTED["goodput"],
        "ttft_ok": ttft <= WANTED["ttft"],
        "refusal_ok": refusal < WANTED["refusal_s"],
    }


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure the three phases and print the verdict; returns the exit code."""
    parser = command_parser("overload", __doc__, f"An API key is read from {KEY_VARIABLE}.")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the overload [300]")
    parser.add_argument("--capacity-seconds", type=float, default=40.0, help="of other phases [40]")
    parser.add_argument("--times", type=float, default=4.0, help="overload's rate / capacity [4]")
    parser.add_argument(
        "--tokens", type=int, default=64, help="of an answer on average, varied by a half [64]"
    )
    parser.add_argument("--batch", type=int, default=32, help="the engine's max_num_seqs [32]")
    parser.add_argument("--port", type=int, default=0, help="port of a running gateway")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("serve", nargs="*", help="further options of `aerie serve`, after --")
    arguments = parser.parse_args(argv)
    arguments.places = arguments.batch + -(-arguments.batch // 8)  # as admission counts
    if arguments.port:
        if not _ready(arguments.port):
            raise RuntimeError(f"no gateway is ready on port {arguments.port}")
        found = asyncio.run(measure(arguments.port, arguments))
    else:
        with gateway(arguments) as port:
            found = asyncio.run(measure(port, arguments))
    print(json.dumps({**vars(arguments), "phases": found, **verdict(found)}))
    return 0
