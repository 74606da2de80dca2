"""What a mechanism of the controller is worth."""

from __future__ import annotations

import pytest

from bench.simulate import ablation
from bench.simulate.ablation import ALL, MECHANISMS, MechanismWorth
from bench.simulate.fit import cpu
from bench.simulate.traces import Rounds


@pytest.fixture
def worths(monkeypatch: pytest.MonkeyPatch) -> dict[str, MechanismWorth]:
    """Of few short runs at one place, with the mechanisms that are tested here."""
    monkeypatch.setattr(ablation, "STEPS", 400)
    short = {"up and down": (lambda new, rng: Rounds([(1, 4), (16, 32), (1, 4)], new), False)}
    monkeypatch.setattr(ablation, "traces", lambda: short)
    names = {"costs that never fall with K", "probes", "optimism of probes"}
    chosen = tuple(each for each in MECHANISMS if each.name in names)
    assert len(chosen) == 3
    monkeypatch.setattr(ablation, "MECHANISMS", chosen)
    place = ablation.on_cpu(*cpu())[0]
    return {worth.name: worth for worth in ablation.ablation([place], [1, 2])}


def test_with_all_mechanisms_runs_repeat_themselves(worths: dict[str, MechanismWorth]) -> None:
    every = worths[ALL.name]
    assert (every.steady, every.moving) == (1.0, 1.0)
    assert 0.0 < every.gauge_error < 0.2


def test_a_mechanism_that_is_off_changes_what_is_made(worths: dict[str, MechanismWorth]) -> None:
    """Else it was not switched off."""
    ratios = [worth.moving for worth in worths.values()]
    assert len(set(ratios)) == len(ratios)
    assert all(0.5 < ratio < 1.5 for ratio in ratios)
