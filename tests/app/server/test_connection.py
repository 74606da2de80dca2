"""Hostile connections, as raw bytes over a real socket; the application behind is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from app.observability import metrics
from app.server import connection
from app.settings import ServerSettings
from tests.waiting import let_pass, soon

PLENTY_S = 20.0
SMALL_BUFFER = 4096
LIMIT_S = 30.0  # no machine pauses for so long
LATE_S = LIMIT_S + 1.0
SHORT_S = 0.4  # where it does not matter how far a client has come
PATIENT = {
    "header_timeout_s": LIMIT_S,
    "write_timeout_s": LIMIT_S,
    "body_timeout_s": LIMIT_S,
    "idle_timeout_s": 60.0,
}
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Answers `ok` after the body; /slow waits, /big sends for ever, /refuse reads nothing."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.left = asyncio.Event()
        self.bodies: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["path"] == "/refuse":
            await send({**start, "status": 429})
            await send({"type": "http.response.body", "body": b""})
            return
        more, size = True, 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            size += len(message["body"])
            more = message.get("more_body", False)
        self.bodies.append(size)
        if scope["path"] in ("/slow", "/big"):
            await self._until_left(scope, receive, send, start)
            return
        await send(start)
        await send({"type": "http.response.body", "body": b"ok"})

    async def _until_left(self, scope: Any, receive: Any, send: Any, start: Any) -> None:
        watcher = asyncio.create_task(receive())
        await send(start)
        while not watcher.done():
            if scope["path"] == "/big":
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.wait({watcher}, timeout=0.005)
        assert watcher.result()["type"] == "http.disconnect"
        self.left.set()


class Server:
    def __init__(self, app: App, port: int, inner: uvicorn.Server) -> None:
        self.app, self.port, self.inner = app, port, inner

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, data: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        reader, writer = await self.open()
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        answer = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PLENTY_S):
                answer = await reader.read()
        writer.close()
        return answer


@asynccontextmanager
async def serving(app: App | None = None, **limits: Any) -> AsyncIterator[Server]:
    """The application behind the gateway's connections."""
    settings, served = ServerSettings.model_validate({**PATIENT, **limits}), app or App()
    config = uvicorn.Config(
        served, http=connection.factory(settings, {"/livez"}),  # type: ignore[arg-type]
        ws="none", log_config=None, lifespan="off",
        timeout_keep_alive=int(settings.idle_timeout_s), timeout_graceful_shutdown=1,
    )  # fmt: skip
    inner = uvicorn.Server(config)
    inner.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    async with asyncio.timeout(600):  # also of time that a test lets pass
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # Or the kernel would hold megabytes that no client reads.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
            task = asyncio.create_task(inner._serve([listener]))
            try:
                yield Server(served, listener.getsockname()[1], inner)
            finally:
                inner.should_exit = True
                await task


def refusal(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


async def test_a_good_request_and_a_second_one_on_the_same_connection() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
            assert b"ok" in await reader.readuntil(b"0\r\n\r\n")
            await let_pass(LATE_S)  # longer than headers may take: between requests is idle
        writer.close()
        assert server.app.bodies == [3, 3, 3]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 200_000,
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n",
        b"GET / HTTP/1.1\r\nlong: " + b"x" * 33_000 + b"\r\n\r\n",
    ],
)
async def test_oversized_heads(head: bytes) -> None:
    async with serving() as server:
        refusal(await server.say(head), 431)
        assert not server.app.scopes


@pytest.mark.parametrize(
    "before",
    [
        b"",
        REQUEST,
        b"POST / HTTP/1.1\r\ncontent-length: 20000\r\n\r\n" + b"x" * 20_000,
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    ],
    ids=["alone", "behind one", "behind a body", "behind chunks"],
)
async def test_an_oversized_header_that_begins_in_the_chunk_in_which_it_stops(
    before: bytes,
) -> None:
    """The parser says nothing of a header before its end, and nothing more comes after it."""
    async with serving() as server:
        answer = await server.say(before + b"GET / HTTP/1.1\r\nlong: " + b"x" * 65_536)
        assert b"HTTP/1.1 431 " in answer or before, answer[:200]
        assert b" 408 " not in answer


async def test_a_refusal_arrives_although_the_client_goes_on_sending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To close a socket with something unread in it throws away what was answered, too."""
    monkeypatch.setattr(connection, "LINGER_S", LIMIT_S)
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(b"GET / HTTP/1.1\r\nlong: " + b"x" * 40_000)
        await asyncio.sleep(0.2)
        for _ in range(10):
            writer.write(b"x" * 100_000)
            await writer.drain()
        refusal(await reader.read(), 431)
        writer.close()


async def test_a_refused_client_is_not_listened_to_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.3)

    async with serving() as server:
        reader, writer = await server.open()
        writer.write(b"nonsense\r\n\r\n")
        refusal(await reader.read(), 400)

        async def send_on() -> None:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_on(), PLENTY_S)
        assert not server.inner.server_state.connections


async def test_what_stands_before_a_head_does_not_count_for_it() -> None:
    """Requests in one chunk, each far below the limit and together above it."""
    async with serving() as server:
        reader, writer = await server.open()
        body = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n" + b"x" * 60_000
        padded = b"GET / HTTP/1.1\r\nlong: " + b"x" * 20_000
        writer.write(padded + b"\r\n\r\n" + body + padded)
        await asyncio.sleep(0.2)
        writer.write(b"\r\n\r\n")
        for _ in range(3):
            assert b"ok" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02",
        b"hello\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT http://x/ HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nauthorization: Bearer a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        # Two ideas of where a body ends: whoever stands in front may have the other one.
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length : 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_request(data: bytes) -> None:
    async with serving() as server:
        assert refusal(await server.say(data), 400)["type"] == "invalid_request_error"
        assert not [body for body in server.app.bodies if body]


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send byte by byte until the server has closed."""
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)


async def test_slow_headers() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        dripping = asyncio.create_task(drip(writer, b"GET / HTTP/1.1\r\n" + b"x" * 1000))
        connections = server.inner.server_state.connections
        await soon(lambda: any(each._in_head for each in connections))  # type: ignore[union-attr]
        await let_pass(LATE_S)
        async with asyncio.timeout(PLENTY_S):
            refusal(await reader.read(), 408)
        dripping.cancel()
        writer.close()


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with serving(header_timeout_s=SHORT_S) as server:
        assert await server.say(b"") == b""
        assert await server.say(b"\r\n\r\n") == b""


@pytest.mark.parametrize("path", [b"/", b"/refuse"])
async def test_a_slow_body_ends_even_if_nobody_reads_it(
    path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BODY_GRACE_S", 0.1)

    async with serving(body_timeout_s=SHORT_S) as server:
        reader, writer = await server.open()
        writer.write(b"POST " + path + b" HTTP/1.1\r\ncontent-length: 1000\r\n\r\n")
        dripping = asyncio.create_task(drip(writer, b"x" * 1000))
        async with asyncio.timeout(PLENTY_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        dripping.cancel()
        writer.close()


@pytest.mark.parametrize(
    "body",
    [
        b"1;" + b"x" * 500_000,
        b"".join(b"1;%s\r\na\r\n" % (b"x" * 5000) for _ in range(100)),
        b"1\r\na\r\n0\r\n" + b"t: v\r\n" * 100_000,
        b"1\r\na\r\n0\r\nt: " + b"v" * 500_000,
    ],
)
async def test_framing_that_outweighs_the_body(body: bytes) -> None:
    """Chunk extensions and trailers count for no body limit."""
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(body), 16384):
                writer.write(body[at : at + 16384])
                await writer.drain()
        async with asyncio.timeout(PLENTY_S):
            with contextlib.suppress(ConnectionError):
                assert b"ok" not in await reader.read()
        assert not server.app.bodies
        writer.close()


CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("pause_s", [0.0, 0.1], ids=["with the head", "later"])
@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"-1\r\na\r\n",
        b"1\r\nab\r\n",
        b"ffffffffffffffffff\r\n",
        b"2\r\nab\r\n\r\n0\r\n\r\n",
        b"2\r\nab\r\n0\r\nno trailer\r\n\r\n",
    ],
)
async def test_a_malformed_chunked_body(body: bytes, pause_s: float) -> None:
    """The application that waits for the body sees a client that left, and its client a 400."""
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(CHUNKED % b"/")
        await asyncio.sleep(pause_s)
        writer.write(body)
        async with asyncio.timeout(PLENTY_S):
            error = refusal(await reader.read(), 400)
            assert error["type"] == "invalid_request_error"
            if pause_s:
                await server.app.left.wait()
        assert server.app.bodies == []
        writer.close()


async def test_a_malformed_body_is_no_answer_to_the_request_in_front() -> None:
    """What runs is another request, whose client would take the refusal for its answer."""
    async with serving() as server:
        answer = await server.say(CHUNKED % b"/slow" + b"0\r\n\r\n" + CHUNKED % b"/" + b"x\r\n")
        assert b"HTTP/1.1 400" not in answer


async def test_a_malformed_body_after_the_answer_began() -> None:
    class Early(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            await receive()
            self.left.set()

    async with serving(app=Early()) as server:
        reader, writer = await server.open()
        writer.write(CHUNKED % b"/")
        async with asyncio.timeout(PLENTY_S):
            answer = await reader.readuntil(b"part\r\n")
            writer.write(b"x\r\n")
            answer += await reader.read()
        assert answer.count(b"HTTP/1.1") == 1
        writer.close()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("keep_alive", [b"", b"connection: keep-alive\r\n"])
@pytest.mark.parametrize("parts", [[b"ok"], [b"a", b"", b"b" * 100_000, b""], []], ids=len)
async def test_http_1_0_reads_no_chunks(
    method: bytes, keep_alive: bytes, parts: list[bytes]
) -> None:
    """Its body ends with the connection, whatever was asked for."""

    class Parts(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async with serving(app=Parts()) as server:
        answer = await server.say(method + b" / HTTP/1.0\r\nhost: x\r\n" + keep_alive + b"\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == (b"".join(parts) if method == b"GET" else b"")


async def test_http_1_0_with_a_length() -> None:
    class Whole(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"Content-Length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app=Whole()) as server:
        answer = await server.say(b"GET / HTTP/1.0\r\n\r\n")
        assert answer.lower().count(b"content-length: 2") == 1
        assert answer.endswith(b"\r\n\r\nok")
        assert b"transfer-encoding" not in answer


async def test_trailers_never_become_headers() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
            b"1\r\na\r\n0\r\nauthorization: Bearer x\r\n\r\n"
        )
        assert b"ok" in await reader.readuntil(b"0\r\n\r\n")
        assert [name for name, _ in server.app.scopes[0]["headers"]] == [b"transfer-encoding"]
        writer.close()


async def test_a_stream_that_nobody_reads_is_cut() -> None:
    async with serving(write_timeout_s=SHORT_S) as server:
        _, writer = await server.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(PLENTY_S):
            await server.app.left.wait()
        writer.close()


async def test_a_stream_that_is_read_goes_on() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(4):
            for _ in range(20):
                assert await reader.read(65536)
            await let_pass(0.5 * LIMIT_S)
        assert not server.app.left.is_set()
        writer.close()


class Large(App):
    """Answers with so many bytes at once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % self.size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * self.size})


@asynccontextmanager
async def reading_little(server: Server, head: bytes = b"") -> AsyncIterator[socket.socket]:
    """A client that has sent a request, and for which the kernel holds little of the answer."""
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
        yield client


@pytest.mark.parametrize("head", [b"", b"connection: close\r\n"], ids=["kept", "closing"])
async def test_an_answer_that_is_read_slowly_is_read_whole(head: bytes) -> None:
    """Several times the write timeout passes before the buffer is empty enough to write again."""
    loop = asyncio.get_running_loop()
    async with serving(Large(3_000_000)) as server, reading_little(server, head) as client:
        began, received, pauses = loop.time(), 0, 0
        while received < server.app.size:  # type: ignore[attr-defined]
            data = await loop.sock_recv(client, 2**16)
            assert data, f"cut after {received} bytes"
            received += len(data)
            if received // 2**18 > pauses:
                pauses += 1
                await let_pass(0.5 * LIMIT_S)
        assert loop.time() - began > 4 * LIMIT_S


@pytest.mark.parametrize("stop_at", [2**19, 2**14], ids=["early", "almost at the end"])
async def test_an_answer_that_is_no_longer_read_is_cut(stop_at: int) -> None:
    """Catches: a connection that is kept for ever, because its client once read enough of it."""
    loop = asyncio.get_running_loop()
    async with (
        serving(Large(2**20)) as server,
        reading_little(server, b"connection: close\r\n") as client,
    ):
        await loop.sock_recv(client, 1000)
        (connected,) = server.inner.server_state.connections
        while connected.transport.get_write_buffer_size() > stop_at:  # type: ignore[union-attr]
            await loop.sock_recv(client, 1000)
        assert connected.transport.get_write_buffer_size() > 0  # type: ignore[union-attr]
        for _ in range(2):  # at first enough has been read
            await let_pass(LATE_S)
        await soon(lambda: not server.inner.server_state.connections, PLENTY_S)


async def test_an_idle_connection_that_is_reset_is_no_slow_reader() -> None:
    slow = metrics.CONNECTIONS_REFUSED.labels("slow_reader")
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(REQUEST)
        assert b"ok" in await reader.readuntil(b"0\r\n\r\n")
        before = slow._value.get()
        client = writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await soon(lambda: not server.inner.server_state.connections)
        for _ in range(4):  # the time that it may be idle, and that its answer has
            await let_pass(LATE_S)
        assert slow._value.get() == before


async def test_an_idle_client_that_reads_nothing_and_sends_an_empty_line_is_cut() -> None:
    async with serving(Large(60_000)) as server, reading_little(server) as client:
        connections = server.inner.server_state.connections
        await soon(lambda: any(each.transport.get_write_buffer_size() for each in connections))
        await asyncio.get_running_loop().sock_sendall(client, b"\r\n")
        await soon(lambda: any("head" in each._timers for each in connections))
        for _ in range(3):  # it is closed, and its answer has time, too
            await let_pass(LATE_S)
        await soon(lambda: not connections, PLENTY_S)


async def test_one_connection_too_many() -> None:
    async with serving(max_connections=3) as server:
        connections = server.inner.server_state.connections
        kept = [await server.open() for _ in range(3)]
        await soon(lambda: len(connections) == 3)
        refusal(await server.say(REQUEST), 503)
        for _, writer in kept:
            writer.close()
        await soon(lambda: not connections)
        reader, writer = await server.open()
        writer.write(REQUEST)
        assert b"ok" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


async def test_a_full_gateway_answers_those_who_watch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes would end a gateway whose probes fail when it has most to do."""
    monkeypatch.setattr(connection, "PUBLIC_CONNECTIONS", 1)
    probe = b"GET /livez?a=b HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(max_connections=1) as server:
        reader, within = await server.open()
        within.write(REQUEST)
        assert b"ok" in await reader.readuntil(b"0\r\n\r\n")
        answer = await server.say(probe + probe)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        assert answer.count(b"HTTP/1.1") == 1, "the connection is for this request only"
        _, beyond = await server.open()
        await soon(lambda: len(server.inner.server_state.connections) == 2)
        refusal(await server.say(probe), 503)  # those connections have a limit, too
        within.write(REQUEST)
        assert b"ok" in await reader.readuntil(b"0\r\n\r\n"), "a connection within the limit"
        for writer in (within, beyond):
            writer.close()


async def test_a_client_that_leaves_behind_a_pipelined_request_is_noticed() -> None:
    """The request that runs is not the one that was sent last."""
    async with serving() as server:
        _, writer = await server.open()
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" + REQUEST)
        while not server.app.bodies:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.close()
        async with asyncio.timeout(PLENTY_S):
            await server.app.left.wait()
        assert len(server.app.scopes) == 1


async def test_a_head_that_the_server_does_not_read_ends_no_running_answer() -> None:
    """Reading pauses at a request behind one that runs; the next one's head has arrived all the
    same."""
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.write(REQUEST + REQUEST[:20])
        await asyncio.sleep(0.1)
        writer.write(REQUEST[20:])
        for _ in range(3):
            await let_pass(LATE_S)
        assert not reader.at_eof()
        assert not server.app.left.is_set()
        writer.close()
