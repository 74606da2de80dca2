"""The plots and the HTML report of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.sweep.plots import NoPlots, figure_of, pyplot, save, svg
from bench.sweep.report import html
from bench.sweep.table import Table
from bench.systems.method import parse

METHODS = "none,eagle3:3,k:3,k:7,adaptive"
PLAN = {"workload": "mixed", "rounds": 3, "max_tokens": 64, "together": True}


def cell(speed: float, **more: Any) -> dict[str, Any]:
    return {"tokens_per_second": speed, "user_tokens_per_second": speed / 3, **more}


@pytest.fixture
def table() -> Table:
    cells = {}
    for concurrency, best in ((1, 1.0), (8, 0.6)):
        for number in range(3):
            for name, factor in zip(METHODS.split(","), (1, 1.3, 1.8, 1.5, 1.9), strict=True):
                drafts = {"acceptance": [0.7, 0.4, 0.2], "acceptance_length": 2.3, "k_mean": 3.0}
                speed = 100 * concurrency * (1 + (factor - 1) * best) * (1 + number / 10)
                cells[name, concurrency, number] = cell(speed, **(drafts if ":" in name else {}))
    return Table(parse(METHODS), cells)


def test_the_report_is_one_file_with_everything_in_it(table: Table, tmp_path: Path) -> None:
    page = html(table, PLAN, {"cpu": "<A&B>", "cores": 2, "gpus": []}, svg(figure_of(table)))
    assert "adaptive K is 1.90 [1.90, 1.90] times no speculation at 1 user" in page.lower().replace(
        "adaptive k", "adaptive K"
    )
    assert "&lt;A&amp;B&gt;" in page
    assert "<A&B>" not in page
    assert "http" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "").replace("https://matplotlib.org", "")
    assert page.count("<svg") == 1
    assert "1.056" in page  # adaptive over the best fixed K at one user
    assert "<th>best of other rounds</th>" in page
    for name in ("EAGLE-3 K=3", "K=7", "none"):
        assert name in page


def test_the_report_claims_no_best_fixed_k_where_only_k_0_ran() -> None:
    cells = {(name, 1, 0): cell(speed) for name, speed in (("off", 100.0), ("adaptive", 142.1))}
    page = html(Table(parse("off,adaptive"), cells), PLAN, {}, "")
    assert "1.42 times no speculation" in page
    assert "never below" not in page and "best fixed K" not in page


def test_the_report_says_how_it_was_measured(table: Table) -> None:
    plain = html(table, PLAN, {}, "")
    assert "64 tokens an answer, greedy. " in plain and "All servers ran at once." in plain
    changes = {
        "switchback": True, "seconds": 5.0, "settle": 0.5, "temperature": 0.8, "stop_at_eos": True,
        "constraint": "json-schema", "context": 3000, "together": False, "spread": 0.5,
    }  # fmt: skip
    page = html(table, PLAN | changes, {}, "")
    for said in (
        "turns of 5 s under one load; the first 0.5 s of each", "temperature 0.8",
        "at most 64 ± 50% tokens", "held to json-schema", "about 3000 tokens of source code",
        "Servers ran one after the other: ",
    ):  # fmt: skip
        assert said in page
    assert "greedy" not in page and "tail are in the time" not in page


def test_the_drawing_is_svg_and_png(table: Table, tmp_path: Path) -> None:
    files = save(figure_of(table), tmp_path / "sweep.jsonl")
    assert [file.name for file in files] == ["sweep.svg", "sweep.png"]
    drawn = "".join(ElementTree.parse(files[0]).getroot().itertext())
    assert "adaptive" in drawn
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_every_method_has_a_look_of_its_own() -> None:
    methods = "none,eagle3:3,eagle3:7,vllm:3,vllm:7,vllm:11,off,k:1,k:3,k:5,k:7,k:11,adaptive"
    cells = {(name, c, 0): cell(c) for name in methods.split(",") for c in (1, 8)}
    frontier = figure_of(Table(parse(methods), cells)).axes[1].lines
    looks = {(line.get_color(), line.get_linestyle(), line.get_linewidth()) for line in frontier}
    assert len(looks) == len(frontier) == 13


def test_an_empty_sweep_is_drawn_too() -> None:
    table = Table(parse("none"), {})
    assert "<svg" in html(table, PLAN, {}, svg(figure_of(table)))


def test_a_panel_without_lines_says_why() -> None:
    """Turns on one gateway cut answers short: they have no speed of one user."""
    cells = {(name, 1, 0): {"tokens_per_second": 9.0} for name in ("k:1", "adaptive")}
    speedup, frontier, _ = figure_of(Table(parse("k:1,adaptive"), cells)).axes
    said = [[text.get_text() for text in panel.texts] for panel in (speedup, frontier)]
    assert said == [["K = 0 was not measured"], ["turns on one gateway\nhave no whole answers"]]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(NoPlots, match=r"\.\[bench\]"):
        pyplot()
