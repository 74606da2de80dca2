"""A head is known by its weights, wherever it lies."""

from __future__ import annotations

from pathlib import Path

from app.engine.heads.first_head import WEIGHTS, first_head
from app.settings import Settings, load


def settings(drafter: object, model: str = "some/target") -> Settings:
    return load({"model": model, "drafter": str(drafter)}, {})


def test_a_head_is_its_weights_and_its_target(tmp_path: Path) -> None:
    for name, content in (("a", "1"), ("copy", "1"), ("better", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_text(content)
    known = first_head(settings(tmp_path / "a"))
    assert first_head(settings(tmp_path / "copy")) == known
    assert first_head(settings(tmp_path / "better")) != known
    assert first_head(settings(tmp_path / "a", "another/target")) != known


def test_a_head_of_the_hub_is_its_name() -> None:
    assert first_head(settings("org/head")) != first_head(settings("org/other"))
