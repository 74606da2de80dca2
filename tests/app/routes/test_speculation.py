"""GET and PATCH /v1/speculation while the engine stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.engine.configuration.runner import StartPath
from app.engine.speculation_client import SpeculationClient
from app.engine.start_failure import Fallback
from app.engine.supervisor import Phase
from app.main import create_app
from app.routes import speculation
from app.settings import Settings, load
from drafters.control.controller import Controller
from drafters.control.objective import Objective
from tests.app.phased_engine import PhasedEngine
from tests.waiting import until

SETTINGS = load({"calibration_s": 0}, {}, preset="embedded")
PATH = "/v1/speculation"


class Core:
    """An engine that answers unless it is stopped."""

    def __init__(self) -> None:
        self.policy = Controller(5)
        self.stopped = False
        self.waiting = 0  # for a stopped engine

    async def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.waiting += self.stopped
        while self.stopped:  # noqa: ASYNC110 - as SIGSTOP does it: nobody is told
            await asyncio.sleep(0.01)
        if command == "steer":
            self.policy.set_objective(Objective(**arguments))
        return self.policy.snapshot()

    async def run_dummy_batch(self, requests: int, tokens: int) -> None:
        raise NotImplementedError


class SteeredEngine(PhasedEngine):
    """Serves at once; its `SpeculationClient` asks `core`, also every second as in service."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.core = Core()

    async def run(self, on_ready: Callable[[], None]) -> None:
        self.speculation = SpeculationClient(self.core, self.settings, {})
        self.phase = Phase.READY
        self.polling = asyncio.create_task(self.speculation.poll())

    async def stop(self) -> None:
        self.phase = Phase.STOPPING
        self.polling.cancel()


@pytest.fixture
def engine() -> SteeredEngine:
    return SteeredEngine(SETTINGS)


@pytest.fixture
def client(engine: SteeredEngine) -> Iterator[TestClient]:
    with TestClient(create_app(SETTINGS, engine)) as client:
        yield client


@pytest.mark.parametrize("method", ["GET", "PATCH"])
def test_an_engine_that_stands_still_is_told_in_time(
    client: TestClient, engine: SteeredEngine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"json": {"objective": "off"}} if method == "PATCH" else {}
    assert client.request(method, PATH, **body).status_code == 200
    engine.core.stopped = True
    until(lambda: engine.core.waiting)  # the poll has asked and holds the turn
    with monkeypatch.context() as patch:
        patch.setattr(speculation, "ANSWER_WITHIN_S", 0.3)
        refused = client.request(method, PATH, **body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_busy"
    assert int(refused.headers["retry-after"]) >= 1
    engine.core.stopped = False
    assert client.request(method, PATH, **body).status_code == 200


def test_the_path_of_the_start_is_told(client: TestClient, engine: SteeredEngine) -> None:
    engine.path = StartPath.V2
    state = client.get(PATH).json()
    assert (state["enabled"], state["path"], state["fallback"]) == (True, "v2", None)
    assert state["absent_sources"] == ["lookup", "grammar"]  # beside a head
    assert client.get("/readyz").json()["path"] == {"name": "v2", "reason": "none"}
    engine.path = StartPath.V1_EAGER
    engine.fallback = Fallback(StartPath.V2, "memory", "CUDA out of memory")
    told = {"failed": "v2", "reason": "memory", "message": "CUDA out of memory"}
    for state in (client.get(PATH).json(), client.patch(PATH, json={"objective": "off"}).json()):
        assert (state["path"], state["fallback"]) == ("v1-eager", told)
        assert state["absent_sources"] == []
    ready = client.get("/readyz").json()
    assert ready["path"] == {"name": "v1-eager", "reason": "memory"}
    assert "CUDA" not in str(ready), "whoever has no key learns no more than the kind of failure"


def test_a_gateway_that_fell_back_to_no_drafts_has_nothing_to_steer(
    client: TestClient, engine: SteeredEngine
) -> None:
    engine.path = StartPath.NO_DRAFTS
    engine.fallback = Fallback(StartPath.V2, "head", "the head has another shape")
    state = client.get(PATH).json()
    assert (state["enabled"], state["path"]) == (False, "no-drafts")
    assert state["fallback"]["message"] == "the head has another shape"
    assert client.patch(PATH, json={"objective": "off"}).status_code == 400
    assert client.get("/page/figures").json()["drafts"] is False
