"""One live gateway for the tests that can share it, and the clients that talk to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from tests.conftest import OWN_GATEWAYS

from .gateway import MODEL, Gateway

# Set to the address of a gateway that already runs, to try a change without a start.
URL = os.environ.get("AERIE_TEST_URL")
CLIENT_TIMEOUT_S = 30.0
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here, of which those that share a gateway must run in one process."""
    for item in (item for item in items if item.path.is_relative_to(HERE)):
        item.add_marker("e2e")
        sharing = "gateway" in getattr(item, "fixturenames", ())
        assert not (sharing and item.nodeid.split("::")[0] in OWN_GATEWAYS), item.nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure, what the gateway said."""
    report = yield
    gateway = getattr(item, "funcargs", {}).get("gateway")
    if report.failed and isinstance(gateway, Gateway):
        report.sections.append(("the gateway's log", gateway.tail()))
    return report


@pytest.fixture(scope="session", autouse=True)
def direct() -> Iterator[None]:
    """Loopback traffic never goes through a proxy, whatever the caller's environment says."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="package")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The embedded model, drafter on, all else as it comes but compilation, which takes a minute
    where it is the first; the default model's gateway compiles. It ends with the last test of this
    folder: until the session's end it would idle beside all others."""
    if URL:
        yield Gateway.attach(URL)
        return
    log = tmp_path_factory.mktemp("drafting") / "gateway.log"
    with Gateway.launch(log, ["--enforce-eager"]).serving() as running:
        yield running


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways of the embedded model with these options and variables, and kills them."""
    started: list[Gateway] = []

    def start(*args: str, **env: str) -> Gateway:
        started.append(Gateway.launch(tmp_path / f"gateway{len(started)}.log", args, env))
        return started[-1]

    yield start
    for gateway in started:
        gateway.kill()


@pytest.fixture(scope="package")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as client:
        yield client


@pytest.fixture
def fixed_k(http: httpx.Client) -> Iterator[None]:
    """K = 3 for a test whose answer must have drafts: adaptive K is 0 where drafts do not pay."""
    http.patch("/v1/speculation", json={"objective": "fixed", "k": 3}).raise_for_status()
    yield
    http.patch("/v1/speculation", json={"objective": "throughput"}).raise_for_status()


@pytest.fixture(scope="package")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=CLIENT_TIMEOUT_S
    ) as made:
        yield made


@pytest.fixture(scope="package")
def claude(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=gateway.url, api_key="unused", max_retries=0, timeout=CLIENT_TIMEOUT_S
    ) as made:
        yield made


@pytest.fixture(scope="package")
def context_length(http: httpx.Client) -> int:
    """How many tokens prompt and output may have together."""
    return int(http.post("/tokenize", json={"model": MODEL, "prompt": "a"}).json()["max_model_len"])


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Blames the test that took the shared gateway down, not the next one."""
    yield
    if {"gateway", "http"} <= set(request.fixturenames):
        shared: Gateway = request.getfixturevalue("gateway")
        assert shared.alive(), f"this test ended the gateway{shared.tail()}"
        ready = request.getfixturevalue("http").get("/readyz")
        assert ready.status_code == 200, f"no longer ready: {ready.text}{shared.tail()}"
