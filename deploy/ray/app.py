"""N gateways behind Ray Serve, each with its own engine in its own processes.

    serve run deploy.ray.app:build replicas=2 preset=gpt-oss-20b gpus=1

A replica starts `aerie serve` on a free port of its node and hands requests on, byte by byte. Ray's
Python needs `ray[serve]` and httpx only; the gateway is found by `command`, and may live in another
environment. Ray places replicas, counts GPUs (the gateway inherits CUDA_VISIBLE_DEVICES), routes
to the one with fewest requests, and replaces what has died.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ray import serve

POLL_S = 0.5
HEALTH_TIMEOUT_S = 10.0
# Headers of one connection, not of a message (RFC 9110, 7.6.1), and `host`, which httpx sets.
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host"}
)

# A shell that waits for the end of its standard input, which comes however this process ends, and
# then kills the process group given. A gateway left behind would hold the next replica's GPU.
KILL_GROUP_AT_EOF = 'read _; kill -s KILL -- "-$0"'


class Arguments(BaseModel):
    """Arguments of `serve run`. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = 1
    max_replicas: int | None = None  # more than `replicas`: Ray scales by ongoing requests
    ongoing_requests: int = 32  # requests under way per replica at which Ray aims when it scales
    gpus: float = 0
    cpus: float = 1
    preset: str | None = None
    config: str | None = None  # TOML file, at the same place on every node
    options: str = ""  # further ones of `aerie serve`
    command: str = str(Path(sys.executable).with_name("aerie"))
    startup_s: float = 1800
    drain_s: float = 60
    body_s: float = 30  # within which a request's body must have arrived

    def line(self, port: int) -> list[str]:
        """The gateway's command line."""
        line = [*shlex.split(self.command), "serve", "--host", "127.0.0.1", "--port", str(port)]
        line += ["--drain-timeout-s", str(self.drain_s), "--body-timeout-s", str(self.body_s)]
        if self.preset:
            line += ["--preset", self.preset]
        if self.config:
            line += ["--config", self.config]
        if self.gpus > 1:
            line += ["--tensor-parallel-size", str(int(self.gpus))]
        return [*line, *shlex.split(self.options)]


class Gateway:
    """One replica: a gateway in its own process, and the client that hands requests on to it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = Arguments.model_validate(arguments)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(self._arguments.line(port), start_new_session=True)
        self._undertaker = subprocess.Popen(
            ["sh", "-c", KILL_GROUP_AT_EOF, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # there may be nothing left to end
            start_new_session=True,
        )
        self._stopping = False
        try:
            self._wait_ready()
        except Exception:
            self._kill()
            raise
        # A replica whose gateway has died is of no use: Ray replaces it when it ends.
        threading.Thread(target=self._end_with_it, daemon=True).start()
        self._client = httpx.AsyncClient(
            base_url=self._url,
            timeout=httpx.Timeout(None, connect=10.0),  # the gateway has deadlines of its own
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def __call__(self, request: Request) -> Response:
        """Hand a request on; returns the gateway's answer. A client that leaves ends its request in
        the engine.

        The body is handed on as it comes, so that the gateway's limits hold for it. All but that of
        time: httpx reads no answer while it waits for more of a body.
        """
        late = asyncio.get_running_loop().time() + self._arguments.body_s
        headers = [
            (name, value)
            for name, value in request.headers.raw
            if name.decode("latin-1").lower() not in HOP_BY_HOP
        ]
        # The gateway sees a loopback address: without keys nobody behind a proxy is an admin.
        headers.append((b"via", b"1.1 ray"))
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        has_body = not {"content-length", "transfer-encoding"}.isdisjoint(request.headers)
        body = _upload(request, late) if has_body else None
        outgoing = self._client.build_request(request.method, target, headers=headers, content=body)
        try:
            answer = await self._client.send(outgoing, stream=True)
        except httpx.TransportError as error:
            message = f"The gateway of this replica does not answer ({type(error).__name__})."
            return _error(503, message, "server_error", "engine_not_ready", {"Retry-After": "1"})
        except TimeoutError:
            message = f"The body did not arrive within {self._arguments.body_s:g} s."
            return _error(408, message, "invalid_request_error", None, {"Connection": "close"})
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
        return StreamingResponse(_body(answer), answer.status_code, headers=kept)

    async def check_health(self) -> None:
        """Ray's health check. An exception ends the replica."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the gateway ended with code {self._process.returncode}")
        answer = await self._client.get("/livez", timeout=HEALTH_TIMEOUT_S)
        answer.raise_for_status()

    def gateway_process(self) -> int:
        """The gateway's process id, on the replica's node."""
        return self._process.pid

    async def __del__(self) -> None:
        """End the gateway. Ray calls this once the replica's requests have ended or timed out."""
        self._stopping = True
        if self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, self._arguments.drain_s + 15)
            except subprocess.TimeoutExpired:
                self._kill()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._arguments.startup_s
        while True:
            code = self._process.poll()
            if code is not None:
                raise RuntimeError(f"the gateway ended with code {code} before it was ready")
            try:
                with httpx.Client(trust_env=False, timeout=HEALTH_TIMEOUT_S) as client:
                    if client.get(f"{self._url}/readyz").status_code == 200:
                        return
            except httpx.TransportError:
                pass  # not listening yet
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready within {self._arguments.startup_s:.0f} s")
            time.sleep(POLL_S)

    def _end_with_it(self) -> None:
        code = self._process.wait()
        if not self._stopping:
            print(f"the gateway ended with code {code}; so does its replica", file=sys.stderr)
            os._exit(1)

    def _kill(self) -> None:
        """Kill the gateway and the engine's processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


async def _upload(request: Request, late: float) -> AsyncIterator[bytes]:
    """The body's parts. Raises TimeoutError if one has not come at `late`, by the loop's clock."""
    parts = request.stream()
    while True:
        async with asyncio.timeout_at(late):
            part = await anext(parts)
        if not part:  # the last one
            return
        yield part


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


def _error(
    status: int, message: str, kind: str, code: str | None, headers: dict[str, str]
) -> JSONResponse:
    envelope = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": envelope}, status, headers=headers)


def build(arguments: dict[str, Any]) -> Any:
    """The application, for `serve run` and for a configuration file's `import_path`."""
    checked = Arguments.model_validate(arguments)
    options: dict[str, Any] = {
        "name": "gateway",
        # Ray queues requests beyond this; the gateway's admission queue rejects with 429 before.
        "max_ongoing_requests": 1000,
        "health_check_period_s": 5,
        "health_check_timeout_s": HEALTH_TIMEOUT_S + 5,
        "graceful_shutdown_timeout_s": checked.drain_s + 30,
        "ray_actor_options": {"num_cpus": checked.cpus, "num_gpus": checked.gpus},
    }
    if checked.max_replicas and checked.max_replicas > checked.replicas:
        options["autoscaling_config"] = {
            "min_replicas": checked.replicas,
            "max_replicas": checked.max_replicas,
            "target_ongoing_requests": checked.ongoing_requests,
            "downscale_delay_s": 600,  # a new replica loads its model for minutes
        }
    else:
        options["num_replicas"] = checked.replicas
    return serve.deployment(Gateway).options(**options).bind(checked.model_dump())
