"""A head is known by its weights, wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafters.learning.first_head import (
    WEIGHTS,
    first_head,
    is_another_head,
    is_another_target,
)

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


def test_a_target_is_its_weights_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a folder under another spelling was another target, and another model of the same
    name was none."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")
    weights = bytearray(3 * 2**23)
    (target / WEIGHTS).write_bytes(weights)
    known = first_head(str(target), None, "org/head")
    monkeypatch.chdir(tmp_path)
    for spelling in ("model", "./model/", f"{tmp_path}/./model"):
        assert first_head(spelling, None, "org/head") == known
    weights[2**23 : 2**24] = bytes([1]) * 2**23  # one layer of a fine-tune
    (target / WEIGHTS).write_bytes(weights)
    changed = first_head(str(target), None, "org/head")
    assert changed != known and is_another_target(changed, known)
    assert not is_another_target(changed, first_head("model", None, "org/other"))
