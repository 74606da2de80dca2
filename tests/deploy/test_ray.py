"""Two replicas on a local Ray. Under sixteen clients the gateway of one is killed, then the process
of Ray that holds one.

Ray wants an environment of its own (`pip install 'ray[serve]' httpx pytest`), in which this file
runs alone, with a stand-in for the gateway (three minutes on a busy core) or with real ones (two
engines with the embedded model: eight minutes on two busy cores, VLLM_CPU_OMP_THREADS_BIND=1):

    python -m pytest -c /dev/null --rootdir . tests/deploy/test_ray.py -s -m "not e2e"
    python -m pytest -c /dev/null --rootdir . tests/deploy/test_ray.py -s -m e2e

The real gateway is `.venv/bin/aerie`, or what $AERIE_RAY_COMMAND names.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")
serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.ray.app import Arguments, build  # noqa: E402 - after the skips

STAND_IN = f"{sys.executable} {Path(__file__).with_name('stand_in.py')}"
REAL = os.environ.get("AERIE_RAY_COMMAND", str(ROOT / ".venv" / "bin" / "aerie"))
# A gateway's model is named after its process, so that an answer says who gave it.
NAMED = 'exec "$@" --preset embedded --served-model-name "aerie-$$"'
PORT = 18439
REPLICAS, CLIENTS = 2, 16
BODY = {"prompt": "def read(path):\n", "max_tokens": 40, "temperature": 0}
HUNG_S = 60.0
# Ray gives up on its own parts where a machine is busy, and runs what it starts at niceness 15.
PATIENCE = {
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0",
}


@dataclass
class Call:
    """One streamed request, as its client saw it."""

    started: float
    ended: float = 0.0
    gateway: int | None = None  # None: nothing came
    whole: bool = False
    error: str = ""


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, url: str) -> None:
        self.calls: list[Call] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=[url]) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def whole(self, since: float = 0.0) -> list[Call]:
        return [call for call in list(self.calls) if call.whole and call.started >= since]

    def gateways(self, since: float = 0.0) -> set[int | None]:
        return {call.gateway for call in self.whole(since)}

    def _client(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=HUNG_S, trust_env=False) as client:
            while not self._over.is_set():
                call = Call(time.monotonic())
                try:
                    self._ask(client, call)
                except httpx.TransportError as error:
                    call.error = type(error).__name__
                call.ended = time.monotonic()
                self.calls.append(call)

    def _ask(self, client: httpx.Client, call: Call) -> None:
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            if answer.status_code != 200:
                call.error = f"{answer.status_code} {answer.read()[:200]!r}"
                return
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    call.whole = True
                elif line.startswith("data: ") and "model" in (event := json.loads(line[6:])):
                    call.gateway = int(event["model"].removeprefix("aerie-"))
                elif line.startswith("data: "):
                    call.error = line[:200]
        call.error = call.error or ("" if call.whole else "cut off")


@dataclass(frozen=True)
class Service:
    url: str
    real: bool

    def within(self, seconds: float, condition: Callable[[], bool], what: str) -> None:
        seconds *= 5 if self.real else 1
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.update(PATIENCE)
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module", params=["stand-in", pytest.param("engines", marks=pytest.mark.e2e)])
def service(request: pytest.FixtureRequest, cluster: None) -> Iterator[Service]:
    real = request.param == "engines"
    if real and not Path(shlex.split(REAL)[0]).exists():
        pytest.skip(f"no gateway at {REAL}: make install, or set AERIE_RAY_COMMAND")
    command = ["sh", "-c", NAMED, "sh", *shlex.split(REAL if real else STAND_IN)]
    # K follows the load from the first request on: measuring costs at start-up takes turns here.
    options = "--calibration-s 0" if real else ""
    started = time.monotonic()
    serve.run(
        build(
            {
                "replicas": REPLICAS, "command": shlex.join(command), "drain_s": 5,
                "options": options, "startup_s": 400,
            }
        )
    )  # fmt: skip
    print(f"\n{request.param}: {REPLICAS} replicas after {time.monotonic() - started:.0f} s")
    yield Service(f"http://127.0.0.1:{PORT}", real)
    handle = serve.get_app_handle("default")
    last = {handle.gateway_process.remote().result(timeout_s=30) for _ in range(8)}
    serve.delete("default")
    Service("", real).within(
        30, lambda: not any(processes_of(gateway) for gateway in last), f"{last} have ended"
    )


def running() -> int:
    deployment = serve.status().applications["default"].deployments["gateway"]
    return sum(
        count
        for state, count in deployment.replica_states.items()
        if str(state).endswith("RUNNING")
    )


def processes_of(gateway: int) -> list[str]:
    """What lives of a gateway: each one leads a session of its own (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            match = re.match(r"(\d+) \((.*)\) (\S) \d+ \d+ (\d+)", stat.read_text(), re.DOTALL)
        except OSError:
            continue
        if match and int(match[4]) == gateway and match[3] != "Z":
            found.append(f"{match[1]} {match[2]}")
    return found


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_arguments_become_a_command_line() -> None:
    line = Arguments(command="aerie", preset="gpt-oss-20b", gpus=2, options="--k 3").line(7)
    assert line[:6] == ["aerie", "serve", "--host", "127.0.0.1", "--port", "7"]
    assert line[-6:] == ["--preset", "gpt-oss-20b", "--tensor-parallel-size", "2", "--k", "3"]
    with pytest.raises(ValueError, match="replica"):
        build({"replica": 2})


def test_answers_are_plain_and_streamed(service: Service) -> None:
    assert running() == REPLICAS
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
        headers = {"Authorization": "Bearer sk-x"}
        answer = client.post("/v1/completions?a=1", json=BODY, headers=headers)
        assert answer.status_code == 200, answer.text
        if not service.real:
            assert answer.json()["echo"] == BODY
            assert answer.json()["path"] == "/v1/completions?a=1"
            assert answer.json()["key"] == "Bearer sk-x"
            assert answer.json()["via"] == "1.1 ray"  # without keys it makes nobody an admin
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 5
        assert client.get("/nope").status_code == 404


@pytest.mark.parametrize("killed", ["gateway", "replica"])
def test_one_killed_under_load_is_replaced(service: Service, killed: str) -> None:
    with Load(service.url) as load:
        service.within(
            60,
            lambda: len(load.gateways()) == REPLICAS and len(load.whole()) > 4 * CLIENTS,
            "answers of both replicas",
        )
        before = load.gateways()
        victim = min(gateway for gateway in before if gateway is not None)
        (other,) = before - {victim}
        at = time.monotonic()
        os.kill(victim if killed == "gateway" else parent(victim), signal.SIGKILL)
        service.within(
            15, lambda: not processes_of(victim), f"{victim} has gone, its engine with it"
        )
        gone = time.monotonic()
        service.within(
            60, lambda: len(load.gateways(at) - {victim}) == REPLICAS, "answers of two replicas"
        )
        restored = time.monotonic()
        enough = len(load.calls) + 4 * CLIENTS
        service.within(60, lambda: len(load.calls) > enough, "answers afterwards")
    lost = [call for call in load.calls if not call.whole]
    meanwhile = [call for call in load.whole(at) if call.ended < restored]
    longest = max(call.ended - call.started for call in load.calls)
    print(
        f"\n{killed} killed under {CLIENTS} clients: {len(load.calls)} requests, {len(lost)} lost "
        f"(the last {max((c.ended - at for c in lost), default=0):.2f} s after), "
        f"{len(meanwhile)} answers until two replicas answered again, {restored - at:.1f} s after; "
        f"its processes gone after {gone - at:.1f} s; longest request {longest:.1f} s"
    )
    for call in lost:
        print(
            f"  {call.started - at:+.3f} to {call.ended - at:+.3f} s, {call.gateway}: {call.error}"
        )
    # Nobody hangs, and nobody is turned away: only what ran there is lost.
    assert longest < HUNG_S
    assert 0 < len(lost) <= CLIENTS
    assert all(call.started < at for call in lost)
    assert all(call.gateway in (victim, None) for call in lost)
    assert {call.gateway for call in meanwhile} >= {other}  # it went on
    assert not [call for call in load.calls if call.started > restored and not call.whole]
