"""Options that name a head take a folder or a repository of the hub."""

from __future__ import annotations

import argparse
from pathlib import Path

import huggingface_hub
import pytest

from drafters.train.evaluation.evaluate_options import evaluate_parser
from drafters.train.head_option import head_folder, head_name
from drafters.train.learner.options import learn_parser


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A hub that has one head; returns the repositories that were asked for."""
    asked: list[str] = []

    def snapshot_download(name: str) -> str:
        asked.append(name)
        if name != "org/head":
            raise OSError("Repository Not Found\nand where it was looked for")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_commands_take_a_head_of_the_hub(hub: list[str], tmp_path: Path) -> None:
    """As `aerie serve --drafter` does: the preset heads are there."""
    learn = learn_parser(None).parse_args([str(tmp_path), "--target", "t", "--head", "org/head"])
    evaluate = evaluate_parser("").parse_args(["--head", "org/head", str(tmp_path)])
    assert learn.head == tmp_path / "snapshot"
    assert evaluate.head == [tmp_path / "snapshot", tmp_path]


@pytest.mark.parametrize("name", ["/nowhere", "./heads/mine", "../mine", "mine", "a/b/c"])
def test_what_is_no_name_of_the_hub_is_a_folder(hub: list[str], name: str) -> None:
    assert head_folder(name) == Path(name)
    assert hub == []


def test_a_folder_comes_before_the_hub(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "head").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert head_folder("org/head") == Path("org/head")
    assert hub == []


def test_the_error_names_both_and_is_one_line(hub: list[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        head_folder("org/other")
    assert str(error.value) == (
        "org/other is no folder, and the hub gives no such head: Repository Not Found"
    )


def test_a_head_of_the_hub_is_called_by_its_repository(tmp_path: Path) -> None:
    """The fault: by the commit's hash."""
    assert head_name(tmp_path / "models--org--my-head" / "snapshots" / "0f3a9c") == "org/my-head"
    assert head_name(tmp_path / "my-head") == "my-head"
