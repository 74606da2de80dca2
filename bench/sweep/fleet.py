"""The servers of a comparison, which are started when first needed and ended at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from bench.load.client import Client
from bench.load.run import SPECULATION
from bench.systems.commands import Shared, command
from bench.systems.method import Method, largest_k
from bench.systems.server import Server, ServerError, free_port

Report = Callable[[str], None]


class Fleet:
    """The running servers by name. Use it in `async with`, at whose end started servers are ended.

    `given` are gateway settings by name; `eagle3` is the EAGLE-3 head; `attached` has the addresses
    of servers that run already, by server name, which are used and never ended; at the end their
    objective and sources are set back to what they were. `model_free` names an architecture to run
    without weights (bench/systems/model_free.py). `model` is the name of the model on the servers
    that are started.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        given: Mapping[str, Any],
        eagle3: str,
        logs: Path,
        report: Report,
        attached: Mapping[str, str] | None = None,
        model_free: str = "",
    ) -> None:
        folder = logs / "model-free"
        self._shared = Shared.of(largest_k(methods), given, eagle3, model_free, folder)
        self._logs, self._report = logs, report
        self._attached = dict(attached or {})
        self._servers: dict[str, Server] = {}
        self._clients: dict[str, Client] = {}
        self._models: dict[str, str] = {}  # of attached servers, by the server's name
        # Of attached servers that were switched: the PATCH that sets them back, by server name.
        self._before: dict[str, dict[str, Any]] = {}
        self._stack = AsyncExitStack()
        self.model = self._shared.model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for name in list(self._before):
            await self._set_back(name)
        await self._stack.aclose()
        for name in list(self._servers):
            await self.stop(name)

    async def client(self, method: Method) -> Client:
        """A client of the server for `method`, which is started if needed. Raises ServerError."""
        name = method.server
        if name in self._servers:
            self._servers[name].check()
        if name not in self._clients:
            url = self._attached.get(name)
            if url is None:
                client = Client(await asyncio.to_thread(self._start, method))
            else:
                client = Client.of_running_server(url)
            self._clients[name] = await self._stack.enter_async_context(client)
        return self._clients[name]

    async def model_of(self, method: Method) -> str:
        """The name that the server for `method` has for the model: `model`, or the first one that
        an attached server lists if it does not list that. Raises RuntimeError if it lists none."""
        name = method.server
        if name not in self._attached:
            return self.model
        if name not in self._models:
            listed = await (await self.client(method)).models()
            self._models[name] = self.model if self.model in listed else listed[0]
        return self._models[name]

    async def switch(self, method: Method) -> Client:
        """Make the server for `method` use it from now on; returns the server's client."""
        client = await self.client(method)
        if method.changes is not None:
            if method.server in self._attached and method.server not in self._before:
                await self._note_state(method.server)
            await client.json("PATCH", SPECULATION, method.changes)
        return client

    async def stop(self, name: str) -> None:
        """End one server if it was started here, or else set it back."""
        await self._set_back(name)
        self._clients.pop(name, None)
        if server := self._servers.pop(name, None):
            await asyncio.to_thread(server.stop)

    async def _note_state(self, name: str) -> None:
        """Note what sets an attached server back: nothing for one that does not tell its state."""
        text = await self._clients[name].text(SPECULATION)
        state = json.loads(text) if text else {}
        fields = ["objective", "sources"]
        # A PATCH takes these with their own objective only.
        fields += {"fixed": ["k"], "latency": ["tpot_s"]}.get(state.get("objective", ""), [])
        self._before[name] = {field: state[field] for field in fields if field in state}

    async def _set_back(self, name: str) -> None:
        """Undo the switches of an attached server. A failure is reported, so that the error that
        ends the comparison is not lost, and other servers are set back too."""
        changes = self._before.pop(name, None)
        if not changes:
            return
        try:
            await self._clients[name].json("PATCH", SPECULATION, changes)
        except RuntimeError as error:
            self._report(f"{name} was not set back to {json.dumps(changes)}: {error}")

    def _start(self, method: Method) -> str:
        if method.kind == "other":
            name = method.server
            raise ServerError(f"{method.name} must run already: give --attach {name}=URL")
        name, port = method.server, free_port()
        line, environment = command(method, self._shared, port)
        self._report(f"starting {name}")
        log = self._logs / f"{name.replace(':', '-')}.log"
        server = Server(line, environment, port, log)
        self._servers[name] = server  # so that it is ended also if it does not become ready
        return server.wait("/readyz" if method.ours else "/health").url
