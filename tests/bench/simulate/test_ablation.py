"""What a mechanism of the controller is worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli import main
from bench.simulate import ablation
from bench.simulate.ablation import ALL, MECHANISMS, MechanismWorth
from bench.simulate.fit import cpu
from bench.simulate.traces import Rounds


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short moving load, and only the mechanisms that are tested here."""
    short = {"up and down": (lambda new, rng: Rounds([(1, 4), (16, 32), (1, 4)], new), False)}
    monkeypatch.setattr(ablation, "traces", lambda: short)
    names = {"costs that never fall with K", "probes", "optimism of probes"}
    chosen = tuple(each for each in MECHANISMS if each.name in names)
    assert len(chosen) == 3
    monkeypatch.setattr(ablation, "MECHANISMS", chosen)


@pytest.fixture
def worths(few: None) -> dict[str, MechanismWorth]:
    """Of short runs at one place."""
    place = ablation.on_cpu(*cpu())[0]
    return {worth.name: worth for worth in ablation.ablation([place], [1, 2], steps=400)}


def test_with_all_mechanisms_runs_repeat_themselves(worths: dict[str, MechanismWorth]) -> None:
    every = worths[ALL.name]
    assert (every.steady, every.moving) == (1.0, 1.0)
    assert 0.0 < every.gauge_error < 0.2


def test_a_mechanism_that_is_off_changes_what_is_made(worths: dict[str, MechanismWorth]) -> None:
    """Else it was not switched off."""
    ratios = [worth.moving for worth in worths.values()]
    assert len(set(ratios)) == len(ratios)
    assert all(0.5 < ratio < 1.5 for ratio in ratios)


def test_the_command_prints_a_table_and_with_json_a_document(
    few: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--ablation", "--steps", "40", "--replicas", "2", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["ablation"]
    assert [row["name"] for row in found] == [ALL.name, *(m.name for m in ablation.MECHANISMS)]
    for row in found:
        assert any(line.startswith(f"| {row['name']} ") for line in table)
        assert row["steady"] > 0.0
        assert row["gauge_error"] >= 0.0


def test_a_plot_without_a_folder_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--plot", str(tmp_path / "none" / "a.svg")])
    assert "no such folder" in capsys.readouterr().err


def test_plots_of_an_ablation_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--ablation", "--plot", "a.svg"])
    assert "--plot" in capsys.readouterr().err
