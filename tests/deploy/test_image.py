"""Image and compose files name settings that exist, pin what they pull, and know who is healthy."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.commands import sagemaker
from app.engine.configuration.runner import V2
from app.settings import ENV_PREFIX, ServerSettings, read_preset, section_of

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text("utf-8")
COMPOSE_FILES = [REPOSITORY / "docker-compose.yml", REPOSITORY / "deploy" / "compose.gpu.yml"]
GATEWAY = yaml.safe_load(COMPOSE_FILES[0].read_text("utf-8"))["services"]["gateway"]
SETTINGS = {f"{ENV_PREFIX}{name}".upper() for name in section_of()} | {"AERIE_PRESET"}
EXAMPLE = (REPOSITORY / ".env.example").read_text("utf-8")
HEALTHCHECK = REPOSITORY / "deploy" / "healthcheck.py"
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?")


def services() -> Iterator[dict[str, Any]]:
    for file in COMPOSE_FILES:
        yield from yaml.safe_load(file.read_text("utf-8"))["services"].values()


def test_every_setting_that_is_named_exists() -> None:
    named = set(re.findall(r"\bAERIE_[A-Z_]+[A-Z]\b", DOCKERFILE + EXAMPLE))
    for file in COMPOSE_FILES:
        named |= set(re.findall(r"\bAERIE_[A-Z_]+[A-Z]\b", file.read_text("utf-8")))
    assert named <= SETTINGS, named - SETTINGS


def test_compose_passes_on_every_setting() -> None:
    """The fault: a list of settings, and what it lacked was dropped without a word, such as the
    tool parser of the model that .env.example itself names."""
    # Compose 1 takes away what the image sets, if it passes it on without a value.
    of_image = set(re.findall(r"^ +(AERIE_\w+)=", DOCKERFILE, re.MULTILINE)) | {"AERIE_PORT"}
    passed = SETTINGS - of_image | {"HF_TOKEN", V2}
    assert sorted(GATEWAY["environment"]) == sorted(passed)
    overlay = yaml.safe_load(COMPOSE_FILES[1].read_text("utf-8"))["services"]["gateway"]
    assert "environment" not in overlay


def test_the_example_offers_what_compose_reads_and_what_the_gateway_knows() -> None:
    read = {"COMPOSE_FILE", "HF_TOKEN"}
    for file in COMPOSE_FILES:
        read |= set(re.findall(r"\$\{(\w+)", file.read_text("utf-8")))
    offered = set(re.findall(r"^#?([A-Z][A-Z0-9_]+)=", EXAMPLE, re.MULTILINE))
    assert read <= offered
    assert offered - read <= set(GATEWAY["environment"])


def test_the_model_of_the_example_is_served_as_by_its_preset() -> None:
    """Catches: tools of clients that are refused, with settings that were copied from here."""
    preset, _ = read_preset("qwen3-coder-30b")
    for name in ("model", "drafter", "tool_call_parser"):
        assert f"\n#{ENV_PREFIX}{name.upper()}={preset[name]}\n" in EXAMPLE


def test_no_log_of_a_container_fills_the_disk() -> None:
    """Catches: a service whose log Docker keeps without a limit."""
    for name, service in yaml.safe_load(COMPOSE_FILES[0].read_text("utf-8"))["services"].items():
        assert {"max-size", "max-file"} <= service.get("logging", {}).get("options", {}).keys(), (
            name
        )


def test_images_that_are_pulled_are_pinned() -> None:
    bases = re.findall(r"^ARG PYTHON_IMAGE=(\S+)", DOCKERFILE, re.MULTILINE)
    pulled = [s["image"] for s in services() if "build" not in s and "image" in s]
    assert len(bases) == 1
    assert len(pulled) == 2
    for image in bases + pulled:
        assert PINNED.fullmatch(image), image
    assert all("@sha256:" in image for image in pulled)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${PYTHON_IMAGE}"}


def test_the_image_has_what_serves_and_no_tools() -> None:
    assert re.findall(r"requirements/install\.sh (\S+)", DOCKERFILE) == ['"$BACKEND"']
    assert "pip install" not in DOCKERFILE


def test_a_stop_is_longer_than_a_drain() -> None:
    assert int(GATEWAY["stop_grace_period"].removesuffix("s")) > ServerSettings().drain_timeout_s


def test_the_image_holds_what_it_copies_and_runs() -> None:
    kept = {
        line[1:]
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line[:1] == "!"
    }
    assert all((REPOSITORY / path).exists() for path in kept)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for source in {source for sources in copied for source in sources.split()} - {"."}:
        assert source in kept or source.split("/")[0] in kept
        assert (REPOSITORY / source).exists()
    [check] = re.findall(r'CMD \["python", "-S", "(\S+)"\]', DOCKERFILE)
    assert check in kept


@contextmanager
def answering(status: int) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(b'{"phase": "x"}')

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check(port: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", str(HEALTHCHECK)],
        env={"AERIE_PORT": str(port), "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1)])
def test_health_is_readiness(status: int, code: int) -> None:
    with answering(status) as port:
        done = check(port)
    assert done.returncode == code
    assert "phase" in (done.stderr if code else done.stdout)


def test_nobody_there_is_not_healthy() -> None:
    with answering(200) as port:
        pass
    done = check(port)
    assert done.returncode == 1
    assert "127.0.0.1" in done.stderr


def test_without_a_port_it_looks_where_the_gateway_may_listen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """8000, or 8080 as on SageMaker; loaded here, since those ports may be somebody's."""
    spec = importlib.util.spec_from_file_location("healthcheck", HEALTHCHECK)
    assert spec is not None
    assert spec.loader is not None
    healthcheck = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(healthcheck)
    assert (str(ServerSettings().port), str(sagemaker.PORT)) == healthcheck.PORTS
    monkeypatch.delenv("AERIE_PORT", raising=False)
    with answering(200) as second, answering(503) as first:
        monkeypatch.setattr(healthcheck, "PORTS", (str(first), str(second)))
        assert healthcheck.main() == 0
        monkeypatch.setenv("AERIE_PORT", "tcp://10.0.0.1:80")  # of a Service named aerie
        assert healthcheck.main() == 0
    assert healthcheck.main() == 1
