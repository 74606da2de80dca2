"""The load generator against a real engine: its counts are the engine's, its PATCHes work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.served import run
from bench.sweep.cells import Work
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal
from bench.sweep.run import Plan, sweep
from bench.sweep.table import Table
from bench.systems.method import parse

from .gateway import Gateway
from .wire import metric

METHODS = "off,k:3,adaptive"


@pytest.fixture
def steered(http: httpx.Client) -> Iterator[httpx.Client]:
    """Afterwards the gateway is as it was."""
    yield http
    http.patch("/v1/speculation", json={"objective": "throughput"}).raise_for_status()


def test_tokens_are_those_that_the_engine_made(
    gateway: Gateway, http: httpx.Client, tmp_path: Path
) -> None:
    generated, out = metric(http, "vllm:generation_tokens_total"), tmp_path / "run.jsonl"
    options = ["--url", gateway.url, "--concurrency", "4", "--requests", "8", "--repeats", "1"]
    assert run.main([*options, "--max-tokens", "24", "--out", str(out)]) == 0
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    asked = Work([], "", 24, ignore_eos=True, spread=0.5)
    tokens = sum(asked.length(number) for number in range(8))
    assert (line["tokens"], line["failed"]) == (tokens, 0)
    # Eight answers, four that warm up, and four tokens each that ask whether ignore_eos and
    # cache_salt are known.
    assert metric(http, "vllm:generation_tokens_total") - generated == tokens + 4 * 24 + 2 * 4
    assert 0 < line["ttft_ms"]["p50"] < line["e2e_ms"]["p50"]
    assert line["chunks"] <= line["tokens"]
    assert line["provenance"]["versions"]


def swept(gateway: Gateway, tmp_path: Path) -> Journal:
    plan = Plan(
        workload="mixed", chat=False, methods=METHODS, concurrencies=(2,), rounds=1, max_tokens=32,
        seconds=1.0, requests=2, seed=1, together=True, settings={}, switchback=True,
    )  # fmt: skip
    journal, methods = Journal(tmp_path / "sweep.jsonl"), parse(METHODS)
    journal.begin(plan.entry(), {})

    async def measure() -> None:
        attached = {"gateway": gateway.url}
        async with Fleet(methods, {}, "", tmp_path, print, attached) as fleet:
            await sweep(plan, journal, fleet, print)

    asyncio.run(measure())
    assert Table(methods, journal.cells).best[0].ratio > 0
    return journal


@pytest.mark.usefixtures("steered")
def test_a_sweep_of_one_gateway(gateway: Gateway, tmp_path: Path) -> None:
    journal = swept(gateway, tmp_path)
    off, fixed, adaptive = (journal.cells[name, 2, 0] for name in METHODS.split(","))
    assert off["k_mean"] == 0
    assert "acceptance_length" not in off
    assert fixed["k_mean"] == 3
    assert 1 < fixed["acceptance_length"] <= 4
    assert len(fixed["acceptance"]) == 3
    assert adaptive["gauge"] > 0
    assert min(cell["tokens"] for cell in (off, fixed, adaptive)) > 20
