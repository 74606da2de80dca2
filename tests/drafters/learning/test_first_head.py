"""A head is known by its weights, wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafters.learning.first_head import WEIGHTS, first_head, is_another_head

TARGET = "some/target"


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    for name, content in (("a", "1"), ("copy", "1"), ("better", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_text(content)
    return tmp_path


def test_a_head_is_its_weights_and_its_target(heads: Path) -> None:
    known = first_head(TARGET, None, str(heads / "a"))
    assert first_head(TARGET, None, str(heads / "copy")) == known
    assert first_head(TARGET, None, str(heads / "better")) != known
    assert first_head(TARGET, "main", str(heads / "a")) != known
    assert first_head("another/target", None, str(heads / "a")) != known


def test_a_head_of_the_hub_is_its_name() -> None:
    assert first_head(TARGET, None, "org/head") != first_head(TARGET, None, "org/other")


def test_a_folder_is_compared_where_the_weights_are_known(heads: Path) -> None:
    known = first_head("a target", None, str(heads / "a"))
    assert not is_another_head(known, heads / "copy")
    assert is_another_head(known, heads / "better")
    assert is_another_head(known, heads / "nothing")
    assert not is_another_head(first_head(TARGET, None, "org/head"), heads / "a")
