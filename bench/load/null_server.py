"""A server that answers at once, against which the client's own limit is measured.

Tests use it too. It is an asyncio protocol with just enough HTTP/1.1 to stream OpenAI's events, in
a process or event loop of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any

PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Script:
    """How every request is answered, and what was received."""

    chunks: int = 64  # events with text
    tokens: int = 128  # completion tokens in the usage
    first_s: float = 0.0  # seconds before the first event
    gap_s: float = 0.0  # seconds between events
    seen: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)  # method, path, body
    model: str = "m"  # that GET /v1/models lists
    pages: dict[str, str] = field(default_factory=dict)  # path -> body of another GET
    refuses: tuple[str, ...] = ()  # fields of a body that are answered with a 400
    usage: bool = True
    done: bool = True
    running: int = 0
    most_running: int = 0


class NullServer(asyncio.Protocol):
    """One connection to a server that answers from a script."""

    def __init__(self, script: Script) -> None:
        self._script, self._buffer = script, b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport that answers are written to."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """End the answers to a client that has gone, as a server does."""
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse requests with Content-Length, one after the other, and answer them."""
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, rest = self._buffer.split(b"\r\n\r\n", 1)
            lines = head.decode("latin-1").split("\r\n")
            named = (line.partition(":") for line in lines[1:])
            length = {name.lower(): value for name, _, value in named}.get("content-length", "0")
            if len(rest) < int(length):
                return
            body, self._buffer = rest[: int(length)], rest[int(length) :]
            method, path, _ = lines[0].split(" ", 2)
            task = asyncio.ensure_future(self._answer(method, path, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, method: str, path: str, body: bytes) -> None:
        script = self._script
        payload = json.loads(body) if body else {}
        script.seen.append((method, path, payload))
        if method != "POST":
            text = script.pages.get(path, "")
            if path == "/v1/models":
                text = json.dumps({"data": [{"id": script.model}]})
            known = bool(text) or path in script.pages or method == "PATCH"
            return self._write("200 OK" if known else "404 Not Found", text or "{}")
        if bad := [name for name in script.refuses if name in payload]:
            return self._write("400 Bad Request", json.dumps({"error": {"message": bad[0]}}))
        script.running += 1
        script.most_running = max(script.most_running, script.running)
        try:
            await self._stream("chat" in path)
        finally:
            script.running -= 1
        return None

    async def _stream(self, chat: bool) -> None:
        script = self._script
        if script.first_s:
            await asyncio.sleep(script.first_s)
        self._transport.write(PAGE)
        text = {"delta": {"content": "ab "}} if chat else {"text": "ab "}
        event = _chunk({"choices": [{"index": 0, **text}]})
        for index in range(script.chunks):
            if index and script.gap_s:
                await asyncio.sleep(script.gap_s)
            self._transport.write(event)
            if not script.gap_s and index % 16 == 15:
                await asyncio.sleep(0)  # let other connections write
        usage = {"prompt_tokens": 7, "completion_tokens": script.tokens}
        if script.usage:
            self._transport.write(_chunk({"choices": [], "usage": usage}))
        self._transport.write((_framed(b"data: [DONE]\n\n") if script.done else b"") + b"0\r\n\r\n")

    def _write(self, status: str, text: str) -> None:
        body = text.encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


def _chunk(event: dict[str, Any]) -> bytes:
    return _framed(b"data: " + json.dumps(event).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def start(script: Script, port: int = 0) -> tuple[asyncio.Server, int]:
    """Listen on a loopback port; returns the server and its port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NullServer(script), "127.0.0.1", port)
    return server, server.sockets[0].getsockname()[1]


async def _serve(port: int, chunks: int, gap_s: float) -> None:
    script = Script(chunks, chunks, gap_s=gap_s, pages={"/health": "{}"})
    server, _ = await start(script, port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
