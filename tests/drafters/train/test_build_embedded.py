"""The recipe of the embedded models: its cards say what the files beside them say."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from drafters.model.checkpoint import WEIGHTS
from drafters.model.round_weights import round_weights
from drafters.train.build_embedded import HEADS, finish
from drafters.train.embedded import EMBEDDED
from drafters.train.evaluation import evaluate_head

CARDS = ("target", *HEADS)


def table_of(name: str) -> str:
    """The evaluation's table in the card of an embedded head."""
    lines = (EMBEDDED / name / "README.md").read_text("utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def test_the_shipped_cards_are_those_of_the_shipped_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, dimensions, data and training are read from the files, never written by hand, and the
    command is the one that was run. In place of an evaluation the shipped tables are printed."""
    copy, evaluations = tmp_path / "embedded", dict[str, list[str]]()
    shutil.copytree(EMBEDDED, copy)
    for name in CARDS:
        (copy / name / "README.md").unlink()

    def evaluate(argv: Sequence[str]) -> int:
        name = Path(argv[argv.index("--head") + 1]).name
        evaluations[name] = [*argv]
        print(f"progress\n{table_of(name)}")
        return 0

    monkeypatch.setattr(evaluate_head, "main", evaluate)
    finish(copy, threads=1)
    for name in CARDS:
        shipped = (EMBEDDED / name / "README.md").read_text("utf-8")
        assert (copy / name / "README.md").read_text("utf-8") == shipped
    assert list(evaluations) == list(HEADS)
    for name, argv in evaluations.items():
        card = " ".join((copy / name / "README.md").read_text("utf-8").split())
        options = argv[: argv.index("--threads")]
        command = " ".join(["aerie evaluate", *options]).replace(str(copy), "models/embedded")
        assert f"`{command}`" in card


@pytest.mark.parametrize("name", HEADS)
def test_the_shipped_heads_are_rounded_as_the_recipe_rounds(name: str, tmp_path: Path) -> None:
    shipped = EMBEDDED / name / WEIGHTS
    shutil.copy(shipped, tmp_path / WEIGHTS)
    round_weights(tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == shipped.read_bytes()
