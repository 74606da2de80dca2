"""What the page costs a real engine."""

from __future__ import annotations

import time

import httpx
import psutil
import pytest

from .gateway import MODEL, Gateway

POLLS = 200
SHARE_OF_A_CORE = 0.005  # at one poll a second


def test_polling_costs_next_to_nothing(http: httpx.Client, gateway: Gateway) -> None:
    """Processor time of the gateway and its engine, with that of an idle gateway taken off."""
    if gateway.process is None:
        pytest.skip("this gateway's processes are not known")
    http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 8})
    root = psutil.Process(gateway.process.pid)

    def used() -> float:
        times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    began, at = used(), time.monotonic()
    time.sleep(2)
    idle = (used() - began) / (time.monotonic() - at)
    began, at = used(), time.monotonic()
    for _ in range(POLLS):
        assert http.get("/page/figures").status_code == 200
    spent = used() - began - idle * (time.monotonic() - at)
    assert spent / POLLS < SHARE_OF_A_CORE
