"""What the application joins: the generation that drafts is entered with each captured sequence,
and nothing is kept of tenants that are excluded."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi.testclient import TestClient

from app.engine.supervisor import Engine
from app.main import create_app
from app.settings import load
from drafters.learning.captured import FOLDER, Captured, read
from tests.app.fake_engine import TARGET

HEAD = TARGET.parent / "p-eagle"


def test_sequences_are_captured_with_the_generation_that_drafts(tmp_path: Path) -> None:
    folder = tmp_path / "learning"
    given = {"model": str(TARGET), "drafter": str(HEAD), "learn": str(folder), "learn_train": False}
    settings = load(given, {})
    engine = Engine(settings)
    create_app(settings, engine)
    assert engine.learning is not None and engine.heads is not None
    assert engine.learning.capture.generation() == 0
    engine.heads.generation = 3
    assert engine.learning.capture.generation() == 3
    engine.learning.folder.close()


KEYS = """
[tenants.law]
{learn}
[[keys]]
id = "k"
tenant = "law"
sha256 = "{digest}"
"""


def test_a_tenant_that_is_excluded_by_new_keys_loses_what_was_captured(tmp_path: Path) -> None:
    folder, keys = tmp_path / "learning", tmp_path / "keys.toml"
    keys.write_text(KEYS.format(learn="", digest="0" * 64))
    given = {"model": str(TARGET), "drafter": str(HEAD), "learn": str(folder)}
    given |= {"learn_train": False, "learn_exclude": "mail", "keys_file": str(keys)}
    settings = load(given, {})
    engine = Engine(settings)
    app = create_app(settings, engine)
    assert engine.learning is not None
    capture = engine.learning.capture
    capture._closing.set()  # it does not rest then
    for tenant in ("law", "mail", "search"):
        capture.offer(Captured(1.0, tenant, 0, [1] * 20, [2] * 20, []))
    capture._work()
    capture._tidy_at = 0.0
    capture._work()
    left = lambda: {sequence.tenant for sequence in read(folder / FOLDER)}  # noqa: E731
    assert left() == {"law", "search"}
    keys.write_text(KEYS.format(learn="learn = false", digest="0" * 64))
    asyncio.run(app.state.admission.keys.refresh())
    capture._tidy_at = 0.0
    capture._work()
    assert left() == {"search"}
    engine.learning.folder.close()


def test_readiness_names_the_learners_task(tmp_path: Path) -> None:
    """Catches: a learner that fails again and again, of which `/readyz` says nothing."""
    given = {"model": str(TARGET), "drafter": str(HEAD), "learn": str(tmp_path / "learning")}
    settings = load(given, {})
    engine = Engine(settings)
    app = create_app(settings, engine)
    assert engine.learning is not None
    shown = TestClient(app).get("/readyz").json()["background"]
    assert shown["learner"] == {"state": "stopped", "failures": 0}
    engine.learning.folder.close()
