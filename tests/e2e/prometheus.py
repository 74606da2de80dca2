"""A real Prometheus beside the gateway: its own process, loopback only, one scrape a second."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import reserved_port
from tests.waiting import until

PROGRAM = shutil.which("prometheus")
RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules"
START_WITHIN_S = 30.0
CONFIGURATION = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}/*.yml"]
scrape_configs:
  - job_name: aerie
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    """Its HTTP API, as far as dashboards and rules need it."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def ask(self, path: str, **parameters: Any) -> Any:
        """The data of an answer; fails with Prometheus' own words."""
        response = self.http.get(f"/api/v1/{path}", params=parameters)
        answer = response.json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        assert not answer.get("warnings"), f"{parameters}: {answer['warnings']}"
        return answer["data"]

    def values(self, expr: str, at: float | None = None) -> list[float]:
        """One number for each series of an expression, now or `at` a Unix time."""
        when = {} if at is None else {"time": at}
        return [
            float(series["value"][1]) for series in self.ask("query", query=expr, **when)["result"]
        ]

    def wait(self, expr: str) -> None:
        """Until the expression, a comparison, has a result."""
        until(lambda: self.values(expr), what=f"never came true: {expr}", every_s=0.2)


@contextlib.contextmanager
def scraping(url: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with our rules on the gateway at `url`; skips where there is none."""
    if PROGRAM is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    configuration = folder / "prometheus.yml"
    configuration.write_text(
        CONFIGURATION.format(rules=RULES, target=url.removeprefix("http://")), "utf-8"
    )
    port = reserved_port()
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={configuration}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
            deadline = time.monotonic() + START_WITHIN_S
            while not _ready(http):
                text = log.read_text(errors="replace")
                assert process.poll() is None, f"prometheus ended: {text[-2000:]}"
                assert time.monotonic() < deadline, f"prometheus is not ready: {text[-2000:]}"
                time.sleep(0.1)
            yield Prometheus(http)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False
