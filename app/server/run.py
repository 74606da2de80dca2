"""Run the gateway: socket, signals, drain, exit code."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import cast

import uvicorn

from app.engine.supervisor import Engine
from app.errors import StartupError
from app.main import create_app
from app.observability import log
from app.server import connection
from app.server.runtime_directory import RuntimeDirectory, runtime_directory
from app.settings import Settings
from drafters.streams import unfailing

logger = logging.getLogger(__name__)


# File descriptors beside clients' connections: models, sockets to the engine, logs.
OTHER_FILES = 512
CUT_OFF_S = 1.0  # for requests to say why they end
THREADS_END_S = 2.0  # how long the end waits for a file system that does not answer


class _Server(uvicorn.Server):
    """uvicorn's server, which does not re-raise the signal that stopped it: a clean stop exits 0.

    SIGHUP, the end of its terminal, stops it like SIGTERM, unless it is ignored (nohup). Requests
    that still run after `drain_s` seconds are ended by `end_requests`, which lets each answer with
    an error; what does not end within CUT_OFF_S after that is cut off.
    """

    def __init__(
        self, config: uvicorn.Config, drain_s: float, end_requests: Callable[[], None]
    ) -> None:
        config.timeout_graceful_shutdown = math.ceil(drain_s + CUT_OFF_S)
        super().__init__(config)
        self._drain_s = drain_s
        self._end_requests = end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop."""
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals, SIGTERM and SIGHUP until the process has ended: what comes while the
        engine and the gateway's files are cleared away does not kill it."""
        signal.signal(signal.SIGTERM, self.handle_exit)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle_exit)
        with super().capture_signals():
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal drains, second Ctrl-C cuts off."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


class _Threads(ThreadPoolExecutor):
    """The event loop's threads. One that hangs in a file system ends with the process: the loop's
    end waits for it no longer than THREADS_END_S."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that do nothing, and the others once they are done."""
        how = {"wait": wait, "cancel_futures": cancel_futures}
        ending = threading.Thread(target=super().shutdown, kwargs=how, daemon=True)
        ending.start()
        ending.join(THREADS_END_S)


def serve(settings: Settings) -> None:
    """Serve until a signal. Raises StartupError when the engine cannot do what was asked."""
    unfailing()
    log.configure(settings.server.log_level, settings.server.log_format)
    with runtime_directory() as directory:
        _serve_until_signal(settings, directory)


def _serve_until_signal(settings: Settings, directory: RuntimeDirectory) -> None:
    engine = Engine(settings, directory.note)
    app = create_app(settings, engine)
    accept = connection.factory(settings.server, app.state.admission.public)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # app/http/access_log.py writes one without clients' text
        http=cast("type[asyncio.Protocol]", accept),
        ws="none",
        timeout_keep_alive=math.ceil(settings.server.idle_timeout_s),
    )
    # uvicorn's warnings are clients' mistakes, and each would be a line in the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    connections = settings.server.max_connections + connection.PUBLIC_CONNECTIONS
    _allow_files(connections + OTHER_FILES)
    with _listen(settings.server.host, settings.server.port) as listener:
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d, loading %s", host, port, settings.model.model)
        server = _Server(config, settings.server.drain_timeout_s, app.state.admission.end_all)
        close_in_forks(lambda: _sockets(server, listener))
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.get_loop().set_default_executor(_Threads(thread_name_prefix="asyncio"))
            runner.run(_serve(server, engine, listener))
    if engine.failure is not None:
        raise engine.failure


async def _serve(server: _Server, engine: Engine, listener: socket.socket) -> None:
    async def stop_when_ended() -> None:
        await engine.ended.wait()
        server.should_exit = True

    watcher = asyncio.create_task(stop_when_ended())
    await server.serve(sockets=[listener])
    watcher.cancel()


def close_in_forks(files: Callable[[], Iterable[int]]) -> None:
    """Close these file descriptors in every process that this one forks.

    Otherwise an engine that is forked would hold the port open while the gateway drains, and
    connections that the gateway has closed.
    """

    def close() -> None:
        # Replaced rather than closed: an object that still has the number may close it once more.
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in files():
            os.dup2(nothing, file, inheritable=False)
        os.close(nothing)

    os.register_at_fork(after_in_child=close)


def _sockets(server: uvicorn.Server, listener: socket.socket) -> list[int]:
    connections = cast("set[connection.Connection]", server.server_state.connections)
    sockets = [one.transport.get_extra_info("socket") for one in connections]
    return [one.fileno() for one in (listener, *sockets) if one.fileno() >= 0]


def _allow_files(wanted: int) -> None:
    """Raise the soft limit on open files; warn if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        logger.warning("open files are limited to %d, %d are wanted (ulimit -n)", most, wanted)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()  # all addresses, those of IPv4 too
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
