"""Faults on purpose: full disks, jumping clocks, stops in the middle, and hours in short.

Each starts gateways of its own: `make faults`. AERIE_SOAK_S=600 is the full soak.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.waiting import until

from .bodies import greedy
from .fuzz import CORPUS
from .gateway import STOP_WITHIN_S, Gateway
from .test_http_errors import JSON_TYPE
from .wire import GENERATED, HELD, JSON, chunks, metric, read_events, wait_for_metric

SOAK_S = float(os.environ.get("AERIE_SOAK_S", "60"))
CLIENTS = 48
EAGER = "--enforce-eager"  # a start is sooner
# Growth of the gateway's memory over the second half of a soak, in MiB and per minute of it.
GROWTH_MIB, GROWTH_PER_MINUTE = 16.0, 4.0
FAKE_TIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("AERIE_FAULTS") != "1", reason="minutes of faults: `make faults`"
    ),
    pytest.mark.timeout(300 + 2 * SOAK_S),
]


def ask(gateway: Gateway) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/completions", json=greedy(), timeout=60, trust_env=False)


def kill_the_engine(gateway: Gateway) -> None:
    core = gateway.engine_core()
    assert core is not None
    core.kill()


def test_a_full_disk_under_the_logs(launch: Any, tmp_path: Path) -> None:
    """Nothing that is written anywhere is worth a request, nor a restart of the engine. Buffered:
    what could not be written is tried again when processes are started and when they end."""
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("needs /dev/full")
    (tmp_path / "gateway0.log").symlink_to("/dev/full")
    options = (EAGER, "--access-log", "--log-level", "debug")
    gateway = launch(*options, PYTHONUNBUFFERED="")
    gateway.log = None  # it cannot be read
    gateway.wait_ready()
    assert ask(gateway).status_code == 200
    kill_the_engine(gateway)
    until(lambda: ask(gateway).status_code == 200, 150, every_s=0.5)
    assert gateway.stop() == 0


def test_a_full_disk_under_the_caches(launch: Any, tmp_path: Path) -> None:
    """Compiled code and step costs are kept on disk. Without room the gateway serves, or says
    in its last line what it could not write."""
    cache = tmp_path / "cache"
    cache.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(cache)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        (cache / "filling").write_bytes(b"x" * 40_000)
        gateway = launch(
            *(EAGER, "--calibration-s", "1"),
            *("--calibration-file", str(cache / "full" / "costs.json")),
            VLLM_CACHE_ROOT=str(cache),
            TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
            XDG_CACHE_HOME=str(cache),
        )
        gateway.wait_ready()
        assert ask(gateway).status_code == 200
        assert gateway.stop() == 0
    finally:
        subprocess.run(["umount", "-l", str(cache)], check=True)


def test_jumps_of_the_clock(launch: Any, tmp_path: Path) -> None:
    """A day forwards and two backwards, with requests under way: no deadline, quota or watch on
    the engine goes by the clock on the wall."""
    if not Path(FAKE_TIME).exists():
        pytest.skip("needs libfaketime")
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    gateway = launch(
        *(EAGER, "--hang-timeout-s", "20", "--request-timeout-s", "120"),
        LD_PRELOAD=FAKE_TIME,
        FAKETIME_TIMESTAMP_FILE=str(clock),
        FAKETIME_NO_CACHE="1",
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    ).wait_ready()
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http:
        for jump in ("+1d", "-1d", "+0"):
            long = greedy(max_tokens=600, stream=True)
            with http.stream("POST", "/v1/completions", json=long) as response:
                events = read_events(response.iter_lines())
                seen = [next(events)]
                clock.write_text(f"{jump}\n")
                seen += list(events)
            ends = [c["finish_reason"] for p in chunks(seen) for c in p["choices"]]
            assert ends[-1] == "length", jump
            assert ask(gateway).status_code == 200
        wait_for_metric(http, HELD, 0, 20)
        assert metric(http, "aerie_engine_restarts_total") == 0
        assert metric(http, "aerie_engine_up") == 1
    assert gateway.stop() == 0


def test_sigterm_in_the_middle_cuts_off_at_the_deadline(launch: Any) -> None:
    gateway = launch(EAGER, "--drain-timeout-s", "1").wait_ready()
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http:
        endless = greedy(max_tokens=1900, n=16, stream=True)
        with http.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            gateway.signal(signal.SIGTERM)
            began = time.monotonic()
            said = [line for line in lines if line]
        cut_s = time.monotonic() - began
    assert any('"shutting_down"' in line for line in said[-2:])
    assert gateway.wait_exit(STOP_WITHIN_S) == 0
    print(f"cut off {cut_s:.1f} s after SIGTERM (--drain-timeout-s 1)")
    assert gateway.leftovers() == []


class Soak:
    """Clients of every kind until the end: readers, leavers, and those who ask for nonsense."""

    def __init__(self, gateway: Gateway, seed: int) -> None:
        self.gateway = gateway
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.end = time.monotonic() + SOAK_S
        self.memory: list[tuple[float, float]] = []  # seconds, MiB
        nonsense = [(path, asked) for path, asked, headers in CORPUS if asked and not headers]
        # Large enough to be the memory that is measured.
        self.nonsense = [case for case in nonsense if len(str(case[1])) < 10_000]

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            kind = self.random.random()
            try:
                if kind < 0.1:
                    path, asked = self.random.choice(self.nonsense)
                    # httpx's own encoding refuses half a surrogate pair, which some bodies hold.
                    answer = await http.post(path, content=json.dumps(asked), headers=JSON_TYPE)
                    await self.note(answer)
                elif kind < 0.5:
                    await self.note(await http.post("/v1/completions", json=self.asked()))
                else:
                    await self.stream(http, leave=kind > 0.8)
            except httpx.HTTPError as error:
                self.seen[type(error).__name__] += 1

    def asked(self, **changes: Any) -> JSON:
        prompt = f"# {self.random.randrange(10**6)}\n" * self.random.choice((1, 1, 20))
        tokens = self.random.choice((1, 16, 64))
        sampled = {"temperature": self.random.choice((0, 1.0)), "n": self.random.choice((1, 1, 3))}
        return greedy(prompt, max_tokens=tokens, **sampled, **changes)

    async def stream(self, http: httpx.AsyncClient, leave: bool) -> None:
        asked = self.asked(stream=True)
        if leave:
            asked["max_tokens"] = 400
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            events = 0
            async for line in response.aiter_lines():
                events += line.startswith("data:")
                if line.startswith('data: {"error"'):
                    self.seen["error event"] += 1
                if leave and events > 3:
                    break
            self.seen[f"{response.status_code} {'left' if leave else 'read'}"] += 1

    async def note(self, response: httpx.Response) -> None:
        self.seen[str(response.status_code)] += 1
        assert response.status_code < 500 or response.status_code == 503, response.text

    async def watch(self) -> None:
        assert self.gateway.process is not None
        process = psutil.Process(self.gateway.process.pid)
        began = time.monotonic()
        while time.monotonic() < self.end:
            size = process.memory_info().rss / 2**20
            self.memory.append((time.monotonic() - began, size))
            await asyncio.sleep(min(5.0, SOAK_S / 20))

    async def kill(self) -> None:
        await asyncio.sleep(SOAK_S / 4)
        kill_the_engine(self.gateway)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.gateway.url, timeout=60, trust_env=False, limits=limits
        ) as http:
            clients = [self.client(http) for _ in range(CLIENTS)]
            await asyncio.gather(self.watch(), self.kill(), *clients)


def test_a_soak_leaks_nothing(launch: Any) -> None:
    """At saturation, with clients that vanish, nonsense, and the engine killed after a quarter."""
    gateway = launch(EAGER, "--max-num-seqs", "16", "--max-waiting", "16").wait_ready()
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http:
        generated = metric(http, GENERATED)
        soak = Soak(gateway, 1)
        asyncio.run(soak.run())
        print(json.dumps(dict(soak.seen)))
        wait_for_metric(http, HELD, 0, 30)
        assert metric(http, "aerie_engine_restarts_total") == 1
        made = metric(http, GENERATED) - generated
        charged = metric(http, "aerie_tenant_tokens_total", kind="output")
        # The warm-up of the second engine is nobody's; a step that came as it died is not counted.
        print(f"{made:.0f} tokens made, {charged:.0f} charged")
        assert charged == pytest.approx(made, rel=0.005, abs=24 + 16 * 6)
        half = [size for at, size in soak.memory if at > SOAK_S / 2]
        quarter = max(1, len(half) // 4)
        first, last = sum(half[:quarter]) / quarter, sum(half[-quarter:]) / quarter
        print(f"gateway: {soak.memory[0][1]:.0f} MiB, {first:.0f} in the middle, {last:.0f} MiB")
        assert last - first < GROWTH_MIB + GROWTH_PER_MINUTE * SOAK_S / 120
        assert soak.seen["200"] > 0
        assert soak.seen["429"] > 0, "no saturation"
    assert gateway.stop() == 0
