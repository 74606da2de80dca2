"""Fixtures: servers that stream scripted answers, and a client of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from threading import Event, Thread
from typing import Any

import pytest

from bench.load.client import Client
from bench.load.null_server import Script, start
from tests.waiting import IN_TIME_S

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


@pytest.fixture
def serve() -> Any:
    """Start fake servers that live beside a command; returns the address of each."""
    ended: list[Callable[[], None]] = []

    def begin(script: Script) -> str:
        ready, ports, loops = Event(), [], []

        async def live() -> None:
            server, port = await start(script)
            stop = asyncio.Event()
            loops.append((asyncio.get_running_loop(), stop))
            ports.append(port)
            ready.set()
            await stop.wait()
            server.close()

        thread = Thread(target=lambda: asyncio.run(live()))
        thread.start()
        assert ready.wait(IN_TIME_S)

        def end() -> None:
            loop, stop = loops[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)

        ended.append(end)
        return f"http://127.0.0.1:{ports[0]}"

    yield begin
    for end in ended:
        end()
