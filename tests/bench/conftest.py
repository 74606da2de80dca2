"""Fixtures: a server that streams scripted answers, and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bench.load.client import Client
from bench.load.null_server import Script, start

Against = Callable[[Script, Callable[[Client], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture
def against() -> Against:
    """Run a coroutine function of a client against a server with a script."""

    def run(script: Script, job: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
        async def both() -> Any:
            server, port = await start(script)
            try:
                async with Client(f"http://127.0.0.1:{port}") as client:
                    return await job(client)
            finally:
                server.close()

        return asyncio.run(both())

    return run
