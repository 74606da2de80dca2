"""Background tasks come back from whatever ends them, and it shows."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY

import app
from app.admission.checksum import with_checksum
from app.admission.tenants import digest_of
from app.background import BackgroundTask
from app.engine.supervisor import Engine, Phase
from app.main import create_app
from app.settings import load
from tests.waiting import soon

IN_TIME_S = 20.0


def failures(task: str) -> float:
    return REGISTRY.get_sample_value("aerie_background_failures_total", {"task": task}) or 0.0


class Work:
    """Ends in each of the given ways, then goes on for ever."""

    def __init__(self, *ends: BaseException | None) -> None:
        self.ends = list(ends)
        self.starts = 0

    async def __call__(self) -> None:
        self.starts += 1
        if not self.ends:
            await asyncio.Event().wait()
        if (end := self.ends.pop(0)) is not None:
            raise end


@pytest.mark.parametrize(
    "end",
    [ValueError("x"), RecursionError(), MemoryError(), asyncio.CancelledError(), None],
    ids=lambda end: type(end).__name__,
)
async def test_whatever_ends_it_it_comes_back(
    caplog: pytest.LogCaptureFixture, end: BaseException | None
) -> None:
    before, work = failures("work"), Work(end)
    async with BackgroundTask("work", work, first_retry_s=0.01) as task:
        await soon(lambda: work.starts == 2)
        assert task.detail == {"state": "running", "failures": 1}
    assert task.state == "stopped"
    assert failures("work") - before == 1
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "work ended unexpectedly" in record.message
    assert (record.exc_info is None) == (end is None), "a stack, to find the defect with"


async def test_each_further_end_waits_twice_as_long_up_to_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = Work(*4 * [ValueError()])
    async with BackgroundTask("work", work, first_retry_s=0.1, max_retry_s=0.3):
        await soon(lambda: work.starts == 5)
    assert [record.args[2] for record in caplog.records if record.args] == [0.1, 0.2, 0.3, 0.3]


async def test_what_is_final_is_raised_and_counts_for_nothing() -> None:
    before = failures("work")
    task = BackgroundTask("work", Work(KeyError()), final=(LookupError,))
    with pytest.raises(KeyError):
        await task.run()
    assert (task.detail, failures("work")) == ({"state": "stopped", "failures": 0}, before)


async def test_it_can_be_cancelled_in_its_pause() -> None:
    task = BackgroundTask("work", Work(ValueError()), first_retry_s=3600)
    async with asyncio.timeout(IN_TIME_S), task:
        await soon(lambda: task.state == "waiting")


class FakeEngine(Engine):
    """Ready without a vLLM; its own tasks run."""

    async def _first_start(self) -> float:
        self.phase = Phase.READY
        self.speculation = FakeSpeculationClient()  # type: ignore[assignment]
        return 0.0

    async def stop(self) -> None:
        self.phase = Phase.STOPPING
        self._stopping.set()

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY

    async def _restart(self, reason: str) -> None:
        self._enter(Phase.READY)  # at once; raises when the gateway stops
        await asyncio.sleep(0)

    async def _end_of(self, hang_timeout_s: float) -> str:
        await self._stopping.wait()
        return "died"


class FakeSpeculationClient:
    async def poll(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("task", "broken"),
    [
        ("keys_file", "app.admission.key_store.KeyStore.refresh"),
        ("speculation_metrics", f"{__name__}.FakeSpeculationClient.poll"),
        ("engine_watch", f"{__name__}.FakeEngine._end_of"),
    ],
)
async def test_every_task_of_the_gateway_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, broken: str
) -> None:
    """Killed once by a defect; then what it watches is watched again, and readiness shows it."""
    keys = tmp_path / "keys.toml"
    keys.write_text(keys_of("one"))
    settings = load({"keys_file": str(keys), "keys_poll_s": "0.01"}, {}, preset="embedded")
    before = failures(task)

    async def defect(*arguments: object) -> None:
        raise RuntimeError("a defect")

    engine = FakeEngine(settings)
    gateway = create_app(settings, engine)
    transport = httpx.ASGITransport(gateway)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
        gateway.router.lifespan_context(gateway),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(broken, defect)
            if task != "keys_file":  # those wait, and begin again with their engine
                await restart(engine)
            await soon(lambda: failures(task) > before)
        shown = (await client.get("/readyz")).json()["background"]
        assert set(shown) == {"keys_file", "speculation_metrics", "engine_watch"}
        assert shown[task]["failures"] >= 1
        every = {one.name: one for one in (*engine.background, *gateway.state.admission.background)}
        await soon(lambda: {one.state for one in every.values()} == {"running"})

        assert (await client.get("/readyz")).json()["keys_file"] == "current"
        keys.write_text("")
        await soon(lambda: gateway.state.admission.keys.stale)
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["keys_file"]) == (200, "stale")
        keys.write_text(keys_of("two"))
        await soon(lambda: gateway.state.admission.identify(b"two") is not None)
        assert gateway.state.admission.identify(b"one") is None


async def restart(engine: FakeEngine) -> None:
    """Begin the engine's tasks anew."""
    engine._stopping.set()
    await asyncio.sleep(0)
    engine._stopping = asyncio.Event()


def keys_of(secret: str) -> str:
    return with_checksum(
        f'[tenants.a]\n[[keys]]\nid = "x"\ntenant = "a"\nsha256 = "{digest_of(secret.encode())}"\n'
    )


# Tasks that their own function awaits, in every case.
AWAITED = {
    "app/routes/request_handler.py",  # a request's work and its client's leaving
    "app/http/streaming.py",  # a stream's events
    "app/llm/async_llm.py",  # a call into the engine
    "app/engine/speculation_client.py",  # a call that several requests wait for
    "app/engine/heads/generations.py",  # a pin, which is made even if its client leaves
    "app/engine/supervisor.py",  # a start and what may end it
    "app/server/run.py",  # waits for the engine's end, and does nothing that can fail
    "app/main.py",  # Engine.run, which ends in `Engine.ended` however it ends
}


def test_no_other_task_is_left_alone() -> None:
    found = set()
    folder = Path(app.__file__).parent
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future"):
                found.add(str(file.relative_to(folder.parent)))
    assert found == AWAITED | {"app/background.py"}
