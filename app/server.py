"""Run the gateway: socket, signals, drain, exit code."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
from types import FrameType
from typing import cast

import uvicorn

from app import connection, log
from app.engine.supervisor import Engine
from app.errors import StartupError
from app.main import create_app
from app.settings import Settings
from drafters.streams import unfailing

logger = logging.getLogger(__name__)


# Files of the process that are no client's connection: models, sockets to the engine, logs.
OTHER_FILES = 512


class _Server(uvicorn.Server):
    """uvicorn that does not re-raise the signal it was stopped with: a clean stop exits 0."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal drains, second Ctrl-C cuts off."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def serve(settings: Settings) -> None:
    """Serve until a signal. Raises StartupError when the engine cannot do what was asked."""
    unfailing()
    log.configure(settings.server.log_level, settings.server.log_format)
    engine = Engine(settings)
    config = uvicorn.Config(
        create_app(settings, engine),
        log_config=None,
        access_log=False,  # app/api/tally.py writes one that quotes no client
        timeout_graceful_shutdown=math.ceil(settings.server.drain_timeout_s),
        http=cast("type[asyncio.Protocol]", connection.factory(settings.server)),
        ws="none",
        timeout_keep_alive=math.ceil(settings.server.idle_timeout_s),
    )
    # Below that it is clients' mistakes, and each would be a line in the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    _allow_files(settings.server.max_connections + OTHER_FILES)
    with _listen(settings.server.host, settings.server.port) as listener:
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d, loading %s", host, port, settings.model.model)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(_Server(config), engine, listener))
    if engine.failure is not None:
        raise engine.failure


async def _serve(server: _Server, engine: Engine, listener: socket.socket) -> None:
    async def stop_when_ended() -> None:
        await engine.ended.wait()
        server.should_exit = True

    watcher = asyncio.create_task(stop_when_ended())
    await server.serve(sockets=[listener])
    watcher.cancel()


def _allow_files(wanted: int) -> None:
    """Raise the soft limit on open files; say so if the hard one is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        logger.warning("open files are limited to %d, %d are wanted (ulimit -n)", most, wanted)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
