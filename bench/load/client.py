"""The HTTP client: it streams answers, and records bytes with the times at which they came.

The client shares the machine's cores with the engine, so it must be cheap: under load it only
appends what it reads to a list. Events are parsed afterwards (events.py).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT_S = 900.0
IDLE_S = 2.0  # connections idle for longer are not reused: servers close idle ones, from 5 s on
# What aiohttp raises if a connection is closed before the head of an answer.
_CLOSED = (
    aiohttp.ServerDisconnectedError,
    aiohttp.ClientOSError,
    aiohttp.ClientConnectionResetError,
)


@dataclass(frozen=True, slots=True)
class Job:
    """A request to send: `path` below the server's address, and the body."""

    path: str
    body: bytes

    @classmethod
    def of(cls, path: str, body: dict[str, Any]) -> Self:
        """A job that posts `body` as JSON."""
        return cls(path, json.dumps(body).encode())


@dataclass(slots=True)
class Record:
    """What came back for a job. Times are those of time.perf_counter()."""

    sent: float
    status: int = 0
    reads: list[tuple[float, bytes]] = field(default_factory=list)  # (time, bytes as they came)
    failure: str = ""


def server_address(url: str) -> str:
    """The address below which a server has its paths, from one with or without `/v1` at its end."""
    return url.rstrip("/").removesuffix("/v1")


@dataclass(slots=True)
class _Connection:
    """Facts about the connection of a request."""

    reused: bool = False


class Client:
    """A client with connections to one server. Use it in `async with`.

    A server may close an idle connection just as the next request is sent over it (llama.cpp's does
    so between two runs). If a reused connection is closed before any part of an answer came, the
    request is sent again, once, over a new connection. A request that was answered in part, or that
    failed over a new connection, is a failure.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = server_address(url)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    @classmethod
    def of_running_server(cls, url: str) -> Self:
        """A client of a server that was not started here: it sends the key in KEY_VARIABLE."""
        return cls(url, os.environ.get(KEY_VARIABLE, ""))

    async def __aenter__(self) -> Self:
        # Without aiohttp's limit of connections, which would queue requests in the client.
        self._session = self._open(aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S))
        self._unpooled = self._open(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    def _open(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            headers=self._headers,
            trace_configs=[tracing],
            trust_env=False,  # never through a proxy
        )

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()
        await self._unpooled.close()

    async def _send(self, method: str, path: str, **content: Any) -> aiohttp.ClientResponse:
        """Send a request; returns when the head of the answer is read, its body is not."""
        url, connection = self.url + path, _Connection()
        try:
            return await self._session.request(method, url, trace_request_ctx=connection, **content)
        except _CLOSED as error:
            # If a part of the head came, it replaces aiohttp's own message, which is a text.
            came_in_part = not isinstance(getattr(error, "message", ""), str)
            if came_in_part or not connection.reused:
                raise
        return await self._unpooled.request(method, url, trace_request_ctx=_Connection(), **content)

    async def stream(self, job: Job) -> Record:
        """Send a job and read its answer to the end; failures are in the record, not raised."""
        record = Record(time.perf_counter())
        try:
            async with await self._send("POST", job.path, data=job.body) as response:
                record.status = response.status
                reads, clock = record.reads, time.perf_counter
                async for data in response.content.iter_any():
                    reads.append((clock(), data))
        except (TimeoutError, aiohttp.ClientError) as error:
            record.failure = f"{type(error).__name__}: {error}"
        if record.status not in (0, 200) and not record.failure:
            text = b"".join(data for _, data in record.reads).decode(errors="replace")
            record.failure = f"HTTP {record.status}: {text[:300]}"
        return record

    async def text(self, path: str) -> str | None:
        """The body of a GET; None if its status is not 200. Raises RuntimeError if there is no
        answer."""
        status, text = await self._ask("GET", path)
        return text if status == 200 else None

    async def json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of an answer. Raises RuntimeError, with the answer's text, for a status of 400
        or more."""
        status, text = await self._ask(method, path, body)
        if status >= 400:
            raise RuntimeError(f"{method} {path}: HTTP {status}: {text[:300]}")
        return json.loads(text)

    async def models(self) -> list[str]:
        """Ids of the models that the server lists. Raises RuntimeError if it lists none."""
        answer = await self.json("GET", "/v1/models")
        try:
            ids = [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            ids = []
        if not ids:
            raise RuntimeError(f"GET {self.url}/v1/models names no model")
        return ids

    async def first_model(self) -> str:
        """Id of the first model that the server lists. Raises RuntimeError if it lists none."""
        return (await self.models())[0]

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        try:
            async with await self._send(method, path, json=body) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            where = f"{method} {self.url}{path}"
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from None


async def _note_reuse(_session: aiohttp.ClientSession, context: Any, _: object) -> None:
    context.trace_request_ctx.reused = True
