"""What processes that the gateway forks have of its sockets, and how it stops."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import uvicorn

from app.engine.supervisor import Phase
from app.main import create_app
from app.server import connection
from app.server.run import _listen, _Server
from app.settings import load
from tests.app.http.fake_operation import PATH, FakeEngine
from tests.waiting import soon

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import os, socket, time
from app.server.run import close_in_forks
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname(), timeout=20)
served, _ = listener.accept()
close_in_forks(lambda: [listener.fileno(), served.fileno()])
other = os.open(os.devnull, os.O_RDONLY)
ready, says = os.pipe()
if os.fork() == 0:
    kept = os.fstat(other)  # everything else is still there
    served.close()  # as a destructor may
    os.write(says, b"1")
    time.sleep(600)
os.read(ready, 1)
address = listener.getsockname()
served.close()
listener.close()
print(client.recv(1))
try:
    socket.create_connection(address, timeout=20)
except ConnectionRefusedError:
    print("refused")
os.killpg(0, 9)
"""


def test_a_forked_child_holds_no_socket_open() -> None:
    """A client would wait for the end of an answer, or for its connection to be accepted."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", SCRIPT],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
        process_group=0,
    )
    assert done.stdout.split() == ["b''", "refused"]


HANGING = """
import asyncio, threading
from app import cli
from app.server import run
from app.settings import load

async def serve(*_):
    hangs = threading.Event()

    def hang():
        hangs.set()
        threading.Event().wait()

    asyncio.get_running_loop().run_in_executor(None, hang)
    while not hangs.is_set():
        await asyncio.sleep(0.01)

run._serve, run.THREADS_END_S = serve, 0.2
cli.main = lambda: run.serve(load({"port": "0"}, {}, preset="embedded")) or 0
cli.run()
"""


def test_a_thread_that_hangs_in_a_file_system_keeps_no_gateway_from_ending() -> None:
    """The fault: a gateway whose keys file was on a network file system that had gone did not end
    at SIGTERM."""
    done = subprocess.run([sys.executable, "-c", HANGING], cwd=REPOSITORY, timeout=60, check=False)
    assert done.returncode == 0


async def test_what_still_runs_when_the_drain_is_over_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = load({"k": "0", "drain_timeout_s": "0.5"}, {}, preset="embedded")
    engine = FakeEngine(settings)
    engine.phase = Phase.READY
    app = create_app(settings, engine)
    accept = connection.factory(settings.server)
    config = uvicorn.Config(app, http=accept, ws="none", log_config=None, access_log=False)  # type: ignore[arg-type]
    server = _Server(config, settings.server.drain_timeout_s, app.state.admission.end_all)
    with socket.create_server(("127.0.0.1", 0)) as listener, caplog.at_level(logging.ERROR):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        task = asyncio.create_task(server._serve([listener]))
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
            bodies = ({"prompt": "x", "wait": True}, {"prompt": "x", "wait": True, "stream": True})
            asked = [asyncio.create_task(client.post(PATH, json=body)) for body in bodies]
            await soon(lambda: engine.fake.running == len(bodies))
            began, server.should_exit = time.monotonic(), True
            whole, stream = await asyncio.gather(*asked)
            await task
    assert time.monotonic() - began >= settings.server.drain_timeout_s
    assert whole.status_code == 503
    assert whole.headers["retry-after"] == "5"
    assert whole.json()["error"]["code"] == "shutting_down"
    (error,) = (line for line in stream.text.splitlines() if '"error"' in line)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert not caplog.records
    assert not app.state.admission.open_requests


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    """The fault: `--host ::` took no IPv4, so that the image's own health check failed."""
    with _listen("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=10).close()
