"""Generations in a real engine: a trial keeps the better head and rolls back the worse one, pins
hold, what is broken is refused, and an engine that dies comes back with the generation in force.

The gateway's head is the embedded one with noise; the embedded one itself is the better."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.engine.heads import generations
from app.engine.heads.generations import HeadGenerations
from app.engine.heads.trial import TrialPlan
from app.engine.supervisor import Engine
from app.errors import ApiError
from app.settings import load
from drafters.learning.lineage import CANDIDATE, KEPT, ROLLED_BACK, SERVICE, Lineage
from tests.drafters import engine_job
from tests.drafters.noised_head import noised
from tests.waiting import soon

pytestmark = [*engine_job.marks(), pytest.mark.usefixtures("launch_undone")]

PLAN = TrialPlan(period_s=1.5, settle_s=0.3, looks=(3, 6, 12, 24))
IN_TIME_S = 400.0
TEXTS = [f"Tell me about {what}, please." for what in ("birds", "a river", "the night", "tea")]
EMBEDDED = load({}, {}, preset="embedded")
HEAD = Path(str(EMBEDDED.speculation.drafter))


@contextlib.asynccontextmanager
async def under_load(engine: Engine) -> AsyncIterator[None]:
    """Answer requests within."""

    async def answer() -> None:
        while True:
            launched = engine._launched
            llm = None if launched is None else launched.llm
            if not engine.ready or llm is None:
                await asyncio.sleep(0.1)
                continue
            with contextlib.suppress(Exception):  # the engine is killed meanwhile
                await llm.answer(TEXTS, 64)

    loading = asyncio.create_task(answer())
    try:
        yield
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


def add(lineage: Lineage, head: Path, folder: Path, verdict: str = CANDIDATE) -> int:
    shutil.copytree(head, folder / "new")
    return lineage.add(folder / "new", {"verdict": verdict, "parent": 0}).number


async def scenario(engine: Engine, heads: HeadGenerations, lineage: Lineage, tmp: Path) -> None:
    def told() -> Any:
        return heads.state(), engine.failure, engine.phase

    await soon(lambda: engine.ready or engine.failure is not None, IN_TIME_S, told)
    assert engine.failure is None, engine.failure
    assert heads.generation == 0
    async with under_load(engine):
        better = add(lineage, HEAD, tmp)
        # Its number is written before what was seen.
        await soon(lambda: lineage.generation(better).trial is not None, IN_TIME_S, told)
        assert lineage.in_force() == better
        trial = lineage.generation(better).trial or {}
        assert (trial["verdict"], trial["by"]) == (KEPT, SERVICE)
        assert trial["interval"][0] > 1.0
        assert trial["speedup"] > trial["speedup_against"]
        await soon(lambda: heads.generation == better, IN_TIME_S, told)

        worse = add(lineage, noised(HEAD, tmp / "worse", 1.0), tmp)
        await soon(lambda: lineage.generation(worse).trial is not None, IN_TIME_S, told)
        trial = lineage.generation(worse).trial or {}
        assert (trial["verdict"], trial["by"]) == (ROLLED_BACK, SERVICE)
        assert trial["against"] == better
        await soon(lambda: heads.generation == better, IN_TIME_S, told)
        assert lineage.in_force() == better

        assert engine.speculation is not None
        rows = {row["generation"]: row for row in engine.speculation.drafts.rows()}
        length = {number: row["accepted"] / row["drafts"] for number, row in rows.items()}
        assert length[better] > length[0] > length[worse]

        broken = add(lineage, HEAD, tmp, KEPT)
        weights = lineage.generation(broken).folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        with pytest.raises(ApiError, match=r"cannot be loaded: .*truncated"):
            await heads.pin(broken)
        assert (heads.generation, lineage.pinned()) == (better, None)
        await heads.pin(0)
        assert (heads.generation, lineage.pinned()) == (0, 0)
        await heads.pin(None)
        assert heads.generation == better

        llm, _ = engine._launched.running  # type: ignore[union-attr]
        os.kill(llm.processes[0], signal.SIGKILL)
        await soon(lambda: not engine.ready, IN_TIME_S, told)
        await soon(lambda: engine.ready, IN_TIME_S, told)
        assert heads.generation == better
        drafted = engine.speculation.drafts.rows()
        await soon(
            lambda: engine.speculation is not None and engine.speculation.drafts.rows() != drafted,
            IN_TIME_S,
            told,
        )
        grown = [
            row["generation"]
            for row, before in zip(engine.speculation.drafts.rows(), drafted, strict=True)
            if row != before
        ]
        assert grown == [better]


# vLLM's client of an engine that was killed leaves its sockets' context to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_generations_in_a_running_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "POLL_S", 0.1)  # a look a second would lengthen each period
    learning = tmp_path / "learning"
    learning.mkdir(mode=0o700)
    settings = load(
        {
            "drafter": str(noised(HEAD, tmp_path / "start", 0.4)),
            "learn": str(learning),
            "learn_train": False,
            "objective": "fixed",
            "k": 4,
            "calibration_s": 2,
            "enforce_eager": True,
            "lookup_k": 0,
        },
        {},
        preset="embedded",
    )

    async def run() -> None:
        engine = Engine(settings)
        heads = engine.heads = HeadGenerations(learning, lambda: "", plan=PLAN)
        running = asyncio.create_task(engine.run(lambda: None))
        try:
            await scenario(engine, heads, Lineage(learning), tmp_path)
        finally:
            await engine.stop()
            await running

    asyncio.run(run())
    gc.unfreeze()  # the engine froze what was there when it was ready
    gc.collect()  # the warning comes here, and in no other test
