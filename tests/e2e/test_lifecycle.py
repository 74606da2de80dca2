"""Starting, refusing to start, and stopping."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.engine.configuration.cpu import threads

from .gateway import STOP_WITHIN_S, Gateway
from .wire import assert_error

HEAD = Path(__file__).parents[2] / "models" / "embedded" / "p-eagle"
BIND_WITHIN_S = 8.0


def assert_refuses(gateway: Gateway, within_s: float, *words: str) -> None:
    """Ends by itself, non-zero, saying why in its last lines rather than in a stack trace alone."""
    code = gateway.wait_exit(within_s)
    assert code > 0, f"exit code {code}{gateway.tail()}"
    end = "\n".join(gateway.text().splitlines()[-8:])
    missing = [w for w in words if w.lower() not in end.lower()]
    assert not missing, f"the last lines do not mention {missing}{gateway.tail()}"
    assert not re.search(r"ready in \d", gateway.text())
    assert gateway.leftovers() == []


def starting(gateway: Gateway, line: str) -> list[httpx.Response]:
    if not gateway.owned:
        pytest.skip("this gateway already ran")
    return gateway.while_starting.get(line, [])


def test_the_port_is_bound_at_once(gateway: Gateway) -> None:
    assert starting(gateway, "GET /livez")[0].status_code == 200
    assert gateway.bound_after_s is not None
    assert gateway.bound_after_s < BIND_WITHIN_S
    print(f"bound after {gateway.bound_after_s:.1f} s, ready after {gateway.ready_after_s:.1f} s")


def test_readiness_names_the_phase_while_starting(gateway: Gateway) -> None:
    *seen, last = starting(gateway, "GET /readyz")
    assert len(seen) > 5
    assert last.status_code == 200
    phases: list[str] = []
    for response in seen:
        assert response.status_code == 503
        assert response.headers["content-type"].startswith("application/json")
        phase = response.json()["phase"]
        assert isinstance(phase, str)
        assert phase
        if phase not in phases:
            phases.append(phase)
    print(f"phases: {phases}")


@pytest.mark.parametrize("line", ["POST /v1/chat/completions", "POST /v1/completions"])
def test_requests_while_starting_are_told_to_retry(gateway: Gateway, line: str) -> None:
    responses = starting(gateway, line)
    assert responses, "asked once, as soon as the port was bound"
    for response in responses:
        assert_error(response, 503)
        assert int(response.headers["retry-after"]) >= 1


def test_ping_while_starting(gateway: Gateway) -> None:
    assert [r.status_code for r in starting(gateway, "GET /ping")] == [503]


def test_an_unknown_environment_key(launch: Any) -> None:
    assert_refuses(launch(AERIE_NO_SUCH_KEY="1"), 15, "AERIE_NO_SUCH_KEY")


def test_a_head_that_does_not_fit_is_never_served_around(launch: Any, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(HEAD, head)
    config = json.loads((head / "config.json").read_text())

    def grow(node: Any) -> None:
        """Twice every hidden size, wherever the config keeps it."""
        if isinstance(node, dict):
            for key, value in node.items():
                if key in {"hidden_size", "target_hidden_size"} and isinstance(value, int):
                    node[key] = 2 * value
                else:
                    grow(value)

    grow(config)
    (head / "config.json").write_text(json.dumps(config))
    gateway = launch("--drafter", str(head))
    assert_refuses(gateway, 120, "hidden")
    ready = gateway.while_starting.get("GET /readyz", [])
    assert all(r.status_code != 200 for r in ready)


@pytest.mark.parametrize("terminal", [False, True], ids=["SIGTERM", "ctrl-c"])
def test_stopping_while_starting(launch: Any, terminal: bool) -> None:
    gateway = launch()
    gateway.wait_bound()
    gateway.signal(signal.SIGINT if terminal else signal.SIGTERM, whole_terminal=terminal)
    code = gateway.wait_exit(STOP_WITHIN_S)
    assert code == 0, f"exit code {code}{gateway.tail()}"
    assert gateway.leftovers() == [], "processes outlived the gateway"


@pytest.mark.slow
def test_ctrl_c_while_it_warms_up(launch: Any) -> None:
    """In the first requests, or in the calibration, which would last for a minute."""
    gateway = launch("--enforce-eager", AERIE_CALIBRATION_S="60")
    gateway.wait_phase("warming")
    gateway.signal(signal.SIGINT, whole_terminal=True)
    code = gateway.wait_exit(STOP_WITHIN_S)
    assert code == 0, f"exit code {code}{gateway.tail()}"
    assert gateway.leftovers() == [], "processes outlived the gateway"


def test_a_taken_port(launch: Any, gateway: Gateway) -> None:
    port = str(httpx.URL(gateway.url).port)
    assert_refuses(launch("--port", port), 60, port)


def test_the_model_runs_in_the_engines_own_process(gateway: Gateway) -> None:
    """Nobody waits for a worker by spinning on a core that the model could have (decision 0015)."""
    if not gateway.owned:
        pytest.skip("this gateway's processes are not ours to see")
    if not threads(os.environ):
        pytest.skip("several NUMA nodes, or threads bound by the environment")
    children = psutil.Process(gateway.process.pid).children(recursive=True)
    names = [child.name() for child in children]
    assert sum("EngineCore" in name for name in names) == 1
    assert not any("Worker" in name for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_no_thread_of_the_engine_hears_the_terminal(gateway: Gateway) -> None:
    """Or Ctrl-C would begin to end the engine under the requests that the gateway drains."""
    if not gateway.owned:
        pytest.skip("this gateway's processes are not ours to see")
    core = gateway.engine_core()
    assert core is not None
    terminal = 1 << signal.SIGINT - 1 | 1 << signal.SIGHUP - 1
    for status in Path(f"/proc/{core.pid}/task").glob("*/status"):
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        assert int(fields["SigBlk"], 16) & terminal == terminal, fields["Name"]
