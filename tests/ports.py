"""Ports for servers that are told on which one to listen."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def reserved_port() -> int:
    """A port of this machine that the system gives to nobody else while the tests run.

    It is bound here, without listening: a server that sets SO_REUSEADDR, as asyncio, Redis and Go
    do, may bind it all the same. A port that was only looked up may be another socket's before a
    server that starts has come so far.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])
