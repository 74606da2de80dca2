"""Demo load for the dashboards, in phases: python -m deploy.grafana.demo_load URL"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence

import httpx

# Phases of the load: concurrent requests, seconds.
PHASES: Sequence[tuple[int, float]] = ((1, 40), (4, 30), (16, 40), (40, 50), (8, 30), (1, 40))
TOKENS = (48, 160, 96, 240)
PROMPTS = (
    "def read_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import asyncio\n\nasync def main():\n",
    "def test_parser():\n    parser = Parser(",
    "    def __repr__(self):\n        return ",
)
TIMEOUT_S = 120.0


async def send_load(url: str, scale: float = 1.0) -> int:
    """Send the load, its phases stretched by `scale`; returns the number of responses with 200."""
    answered = 0
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        numbers = itertools.count()

        async def client(until: float) -> None:
            nonlocal answered
            while time.monotonic() < until:
                number = next(numbers)
                body = {
                    "model": model,
                    "prompt": PROMPTS[number % len(PROMPTS)],
                    "max_tokens": TOKENS[number % len(TOKENS)],
                    "temperature": 0.0 if number % 3 else 0.8,
                }
                response = await http.post("/v1/completions", json=body)
                answered += response.status_code == 200
                if response.status_code == 429:
                    await asyncio.sleep(1)

        for concurrency, seconds in PHASES:
            until = time.monotonic() + seconds * scale
            await asyncio.gather(*(client(until) for _ in range(concurrency)))
    return answered


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.demo_load", description=__doc__)
    parser.add_argument("url", help="the gateway, as http://127.0.0.1:8000")
    parser.add_argument("--scale", type=float, default=1.0, help="stretch the time [1.0]")
    options = parser.parse_args()
    print(f"{asyncio.run(send_load(options.url, options.scale))} requests answered")


if __name__ == "__main__":
    main()
