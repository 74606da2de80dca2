"""An engine without weights, drafts accepted by dice: the rates that were asked for come out."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal
from bench.sweep.run import Plan, sweep
from bench.systems.method import parse
from bench.systems.model_free import ARCHITECTURES

SETTINGS = {"enforce_eager": True, "calibration_s": 0, "max_num_seqs": 8, "max_model_len": 1024}


@pytest.mark.slow
@pytest.mark.skipif(
    "AERIE_MODEL_FREE" not in os.environ,
    reason="starts an engine of its own: AERIE_MODEL_FREE=1 pytest tests/e2e/test_model_free.py",
)
def test_drafts_are_accepted_at_the_published_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.systems.commands.ENGINE", {"max_num_batched_tokens": 1024})
    plan = Plan(
        workload="completion", chat=False, methods="off,k:3", concurrencies=(4,), rounds=1,
        max_tokens=96, seconds=1.0, requests=2, seed=1, together=True,
        settings={**SETTINGS, "kv_cache_gib": 0.25}, model_free="toy",
    )  # fmt: skip
    journal, methods = Journal(tmp_path / "free.jsonl"), parse(plan.methods)
    journal.begin(plan.entry(), {})

    async def measure() -> None:
        shared = (methods, plan.settings, "", tmp_path, print, None, plan.model_free)
        async with Fleet(*shared) as fleet:
            await sweep(plan, journal, fleet, print)

    asyncio.run(measure())
    plain, drafted = journal.cells["off", 4, 0], journal.cells["k:3", 4, 0]
    assert plain["tokens"] == drafted["tokens"] == 8 * 96
    assert "acceptance_length" not in plain
    wanted = ARCHITECTURES["toy"].rates[:3]
    # Some 280 drafts: three standard deviations of a share are below 0.09.
    assert drafted["acceptance"] == pytest.approx(list(wanted), abs=0.12)
    assert drafted["acceptance_length"] == pytest.approx(1 + sum(wanted), abs=0.3)
