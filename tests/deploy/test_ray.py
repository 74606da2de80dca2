"""Two replicas on a local Ray, one killed under load.

Ray wants an environment of its own (`pip install 'ray[serve]' httpx pytest`), in which this file
runs alone: `python -m pytest -c /dev/null --rootdir . tests/deploy/test_ray.py`. The gateway is a
stand-in unless $AERIE_RAY_COMMAND names a real one, `/path/to/.venv/bin/aerie` for example.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")
serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.ray.app import Arguments, build  # noqa: E402 - after the skips

STAND_IN = f"{sys.executable} {Path(__file__).with_name('stand_in.py')}"
REAL = os.environ.get("AERIE_RAY_COMMAND")
REPLICAS, USERS = 2, 8
BODY = {"prompt": "def read(path):\n", "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": 18439})
    serve.run(build({"replicas": REPLICAS, "command": REAL or STAND_IN, "drain_s": 5}))
    yield "http://127.0.0.1:18439"
    serve.shutdown()
    ray.shutdown()


def running() -> int:
    deployment = serve.status().applications["default"].deployments["gateway"]
    return sum(
        count
        for state, count in deployment.replica_states.items()
        if str(state).endswith("RUNNING")
    )


def processes() -> set[int]:
    """The gateways' process ids, asked often enough to reach every replica."""
    handle = serve.get_app_handle("default")
    return {handle.gateway_process.remote().result(timeout_s=10) for _ in range(24)}


def within(seconds: float, condition: Any) -> None:
    seconds *= 3 if REAL else 1
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.5)


def test_arguments_become_a_command_line() -> None:
    line = Arguments(command="aerie", preset="gpt-oss-20b", gpus=2, options="--k 3").line(7)
    assert line[:6] == ["aerie", "serve", "--host", "127.0.0.1", "--port", "7"]
    assert line[-6:] == ["--preset", "gpt-oss-20b", "--tensor-parallel-size", "2", "--k", "3"]
    with pytest.raises(ValueError, match="replica"):
        build({"replica": 2})


def test_answers_come_from_both_replicas_plain_and_streamed(url: str) -> None:
    assert running() == REPLICAS
    assert len(processes()) == REPLICAS
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        headers = {"Authorization": "Bearer sk-x"}
        answer = client.post("/v1/completions?a=1", json=BODY, headers=headers)
        assert answer.status_code == 200, answer.text
        if not REAL:
            assert answer.json()["echo"] == BODY
            assert answer.json()["path"] == "/v1/completions?a=1"
            assert answer.json()["key"] == "Bearer sk-x"
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 5
        assert client.get("/nope").status_code == 404


def test_a_gateway_killed_under_load_is_replaced(url: str) -> None:
    before = processes()
    found: Counter[str] = Counter()
    over = threading.Event()

    def user() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            while not over.is_set():
                try:
                    answer = client.post("/v1/completions", json={**BODY, "stream": True})
                    whole = answer.text.rstrip().endswith("[DONE]")
                    found["ok" if answer.status_code == 200 and whole else "failed"] += 1
                except httpx.TransportError:
                    found["failed"] += 1

    users = [threading.Thread(target=user) for _ in range(USERS)]
    for thread in users:
        thread.start()
    within(60, lambda: found["ok"] > 2 * USERS)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    at_kill = found["ok"]
    within(180, lambda: victim not in processes() and len(processes()) == REPLICAS)
    after = found["ok"]
    within(60, lambda: found["ok"] > after + 2 * USERS)
    over.set()
    for thread in users:
        thread.join()
    print(f"{dict(found)}; {after - at_kill} answers between the kill and two replicas again")
    assert after > at_kill  # the other one went on
    # What ran on the killed one is lost, and what Ray sent there before it knew: no more.
    assert 0 < found["failed"] <= 4 * USERS
