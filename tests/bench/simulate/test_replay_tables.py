"""`aerie simulate` end to end, and the bounds that its figures must keep."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.cli import main
from bench.simulate import fit
from bench.simulate.compare import moving, steady, traces
from bench.simulate.curve import from_length, from_lengths, length
from bench.simulate.minimise import minimise


def test_curves_have_the_lengths_that_they_are_made_from() -> None:
    curve = from_lengths(3, 3.02, 7, 3.94)
    assert (length(curve, 3), length(curve, 7)) == pytest.approx((3.02, 3.94))
    assert all(a >= b for a, b in pairwise(curve))
    assert length(from_length(5, 2.19), 5) == pytest.approx(2.19)


def test_the_search_finds_a_minimum() -> None:
    found = minimise(lambda p: (p[0] - 3) ** 2 + (p[1] * p[0] - 6) ** 2 + abs(p[2] - 0.01), [1] * 3)
    assert found == pytest.approx([3, 2, 0.01], rel=1e-2)


def test_published_ratios_are_within_ten_percent_in_the_median_fitted_or_not() -> None:
    ratios = fit.replay().ratios
    held_out = sorted(abs(ratio.error) for ratio in ratios if not ratio.fitted)
    assert len(ratios) == 55 and len(held_out) == 40
    assert held_out[20] <= 0.10
    assert held_out[-1] <= 0.25


def test_nothing_of_two_workloads_was_fitted() -> None:
    """Held out means held out: other figures there, the same simulation."""
    before = fit.replay().ratios
    table = fit.published()["blog"]["workloads"]["MT-Bench"]
    original = list(table["p-eagle"])
    table["p-eagle"][:] = [2 * speed for speed in original]
    fit._b200.cache_clear()
    try:
        after = fit.replay().ratios
    finally:
        table["p-eagle"][:] = original
        fit._b200.cache_clear()
    assert [r.simulated for r in before] == [r.simulated for r in after]
    assert [r.published for r in before] != [r.published for r in after]


@pytest.mark.parametrize("index", [0, 6, 20, 24, 29])
def test_adaptive_is_not_below_the_best_fixed_k_at_published_places(index: int) -> None:
    place = fit.replay().places[index]
    assert steady(place, seed=11, steps=4000).over_best >= 0.98


@pytest.mark.parametrize("name", ["1-48-1, 48 requests a stage", "burst of 48 for 4 s in 84"])
def test_moving_load_gains_over_every_single_fixed_k(name: str) -> None:
    found = moving(name, seed=1)
    assert found.over_best >= 1.05
    assert found.probe_share <= 0.01


def test_the_cli_prints_tables_a_line_of_json_and_a_drawing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: traces()[name] for name in ["1-48-1, 48 requests a stage"]}
    monkeypatch.setattr("bench.simulate.replay_tables.traces", lambda: few)
    file = tmp_path / "plot.svg"
    assert main(["simulate", "--steps", "40", "--plot", str(file), "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert {"median_error", "worst_error", "worst_adaptive"} <= set(document)
    assert document["cells"] == 55 and 0.5 < document["worst_adaptive"] <= 1.01
    assert sum(line.startswith("| blog ") for line in text) == 42 + 21
    drawn = "".join(ElementTree.parse(file).getroot().itertext())
    assert "held out" in drawn and "1-48-1, 48 requests a stage" in drawn


@pytest.mark.parametrize("argument", ["--replicas=0", "--steps=-1", "--seed=x", "--rep=2"])
def test_wrong_options_are_refused(argument: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", argument])
    assert ended.value.code == 2
