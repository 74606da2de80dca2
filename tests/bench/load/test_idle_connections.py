"""The client against servers that close idle keep-alive connections, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from bench.load.client import Client, Job
from tests.waiting import until

JOB = Job.of("/v1/completions", {"prompt": "x"})
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def read_request(connection: socket.socket) -> bool:
    """Read one request with its body; False at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65536)):
            return False
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = sum(int(line.split(b":")[1]) for line in lengths) - len(body)
    while left > 0:
        left -= len(connection.recv(65536))
    return True


def reset(connection: socket.socket) -> None:
    """Close with RST, as a server does that leaves what was sent to it unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def close_at_the_next_request(connection: socket.socket) -> None:
    """Answer one request; read the next and close: it crossed the server's close on its way."""
    read_request(connection)
    connection.sendall(ANSWER)
    read_request(connection)


def reset_at_the_next_request(connection: socket.socket) -> None:
    """Answer one request, and reset the connection under the next."""
    close_at_the_next_request(connection)
    reset(connection)


def close_when_idle(connection: socket.socket) -> None:
    """Answer one request, and close before another comes."""
    read_request(connection)
    connection.sendall(ANSWER)


def answer_in_part(connection: socket.socket) -> None:
    """Answer one request, and begin an answer to the next."""
    read_request(connection)
    connection.sendall(ANSWER)
    read_request(connection)
    connection.sendall(ANSWER[:30])


def never_answer(connection: socket.socket) -> None:
    """Read a request and close."""
    read_request(connection)


Handler = Callable[[socket.socket], None]


@contextmanager
def serving(handle: Handler) -> Iterator[tuple[str, list[int]]]:
    """A server's address, and its connections so far; each is handled in a thread."""
    opened: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with closing(connection), suppress(ConnectionError):
            handle(connection)

    def accept() -> None:
        with suppress(OSError):  # closed
            while True:
                connection, address = listener.accept()
                opened.append(address[1])
                threading.Thread(target=one, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", opened
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def stream_twice(url: str, between: Callable[[], object] = lambda: None) -> list[Any]:
    """Two records of one client, one after the other. The client's loop stands still `between`
    them: it learns nothing of a close."""

    async def both() -> list[Any]:
        async with Client(url) as client:
            first = await client.stream(JOB)
            between()
            return [first, await client.stream(JOB)]

    return asyncio.run(both())


@pytest.mark.parametrize("handle", [close_at_the_next_request, reset_at_the_next_request])
def test_a_request_over_a_connection_that_was_closed_is_sent_again(handle: Handler) -> None:
    with serving(handle) as (url, opened):
        records = stream_twice(url)
    assert [(record.status, record.failure) for record in records] == [(200, "")] * 2
    assert [b"".join(data for _, data in record.reads) for record in records] == [b"{}"] * 2
    assert len(opened) == 2


def test_connections_that_a_server_closes_when_idle_cost_no_request() -> None:
    records: list[Any] = []
    closed: list[socket.socket] = []

    def handle(connection: socket.socket) -> None:
        close_when_idle(connection)
        connection.close()
        closed.append(connection)

    with serving(handle) as (url, opened):
        for _ in range(5):
            records += stream_twice(url, lambda: until(lambda: len(closed) == len(opened)))
    assert [record.failure for record in records] == [""] * 10
    assert len(opened) == 10


@pytest.mark.parametrize("method", ["GET", "PATCH"])
def test_other_requests_are_sent_again_too(method: str) -> None:
    async def ask(url: str) -> Any:
        async with Client(url) as client:
            await client.stream(JOB)
            return await client.json(method, "/v1/speculation", {} if method == "PATCH" else None)

    with serving(close_at_the_next_request) as (url, _):
        assert asyncio.run(ask(url)) == {}


def test_an_answer_that_came_in_part_is_a_failure() -> None:
    with serving(answer_in_part) as (url, opened):
        first, second = stream_twice(url)
    assert not first.failure
    assert second.failure and second.status == 0
    assert len(opened) == 1


def test_a_new_connection_without_an_answer_is_a_failure_at_once() -> None:
    with serving(never_answer) as (url, opened):
        records = stream_twice(url)
    assert all("Disconnected" in record.failure for record in records)
    assert len(opened) == 2


def test_a_request_is_sent_again_once() -> None:
    """A server that has gone bad altogether is asked twice, not for ever."""
    answered = threading.Event()

    def handle(connection: socket.socket) -> None:
        read_request(connection)
        if not answered.is_set():
            answered.set()
            connection.sendall(ANSWER)
            read_request(connection)

    with serving(handle) as (url, opened):
        first, second = stream_twice(url)
    assert not first.failure and "Disconnected" in second.failure
    assert len(opened) == 2
