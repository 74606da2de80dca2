"""What the application joins: the generation that drafts is entered with each captured sequence."""

from __future__ import annotations

from pathlib import Path

from app.engine.supervisor import Engine
from app.main import create_app
from app.settings import load
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
