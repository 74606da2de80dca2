"""The models in the repository: their cards and their size limit."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from drafters.train.evaluation.workloads import STDLIB

ROOT = Path(__file__).parents[3]
EMBEDDED = ROOT / "models" / "embedded"
PRESET = ROOT / "app" / "presets" / "embedded.toml"
LIMIT = 25 * 2**20  # bytes, the target and both heads together


def test_all_of_them_are_small() -> None:
    assert sum(file.stat().st_size for file in EMBEDDED.rglob("*") if file.is_file()) < LIMIT


def test_both_heads_have_the_same_target_and_the_preset_the_k_of_its_training() -> None:
    parallel, sequential = (
        json.loads((EMBEDDED / name / "provenance.json").read_text())
        for name in ("p-eagle", "eagle3")
    )
    for key in ("target_sha256", "seed", "retain"):
        assert parallel[key] == sequential[key]
    served = tomllib.loads(PRESET.read_text("utf-8"))
    assert parallel["k_train"] == served["speculation"]["k"] == served["about"]["trained_k"]


@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
def test_the_card_quotes_the_evaluation(name: str) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (EMBEDDED / name / "README.md").read_text().splitlines()
        if line.startswith("|")
    ]
    found = {(row[0], row[1]): float(row[2].split()[0]) for row in rows[2:]}
    assert set(found) == {(load, str(k)) for load in STDLIB for k in range(1, 12)}
    # One more drafted token never loses any.
    for load in STDLIB:
        lengths = [found[load, str(k)] for k in range(1, 12)]
        assert lengths == sorted(lengths)
    if name == "p-eagle":
        assert found["stdlib-code", "7"] >= 3.0
        assert found["stdlib-chat", "7"] >= 2.5
