"""Simulated hardware that is fitted to measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli import main
from bench.simulate.compare import traces
from bench.simulate.hardware import Hardware
from bench.simulate.measured import measured

TRUE = Hardware(4e-3, 2e-5, 0.0, 0.0, 1e-5, 1e-3, 4e-6)


def written(file: Path, cells: list[tuple[str, int, int]]) -> Path:
    """Cells (method, batch, K) as `aerie bench device` leaves them behind, costs as of TRUE."""
    lines = [{"kind": "plan", "plan": {}, "provenance": {}}]
    for method, batch, k in cells:
        cell = {"kind": "cell", "key": [method, batch], "k": k, "steps": 20}
        cell["step_ms"] = 1e3 * TRUE.steady(batch, k)
        if k:
            cell["draft_ms"] = 1e3 * TRUE.draft(batch, k)
        lines.append(cell)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


OURS = [(f"k:{k}" if k else "off", batch, k) for k in (0, 3, 7) for batch in (1, 8, 64)]


def test_costs_are_those_that_the_steps_were_made_of(tmp_path: Path) -> None:
    others = [("vllm:3", 1, 3), ("plain", 1, 0)]
    found = measured(written(tmp_path / "steps.jsonl", [*OURS, *others]))
    assert len(found.cells) == len(OURS)  # neither vLLM's nor a gateway without a head
    assert max(found.errors) < 0.02
    # What was never measured follows.
    assert found.hardware.steady(128, 5) == pytest.approx(TRUE.steady(128, 5), rel=0.05)
    assert found.hardware.draft(16, 5) == pytest.approx(TRUE.draft(16, 5), rel=0.05)
    assert [place.concurrency for place in found.places] == [1, 8, 64]
    assert {place.k_max for place in found.places} == {7}


def test_cells_of_a_sweep_are_read_too_whose_k_varied(tmp_path: Path) -> None:
    lines = []
    for method, counts in (("off", {0: 40}), ("k:3", {3: 40}), ("adaptive", {0: 10, 3: 20, 7: 70})):
        for batch in (1, 8, 32):
            seconds = sum(count * TRUE.steady(batch, k) for k, count in counts.items())
            steps = {str(k): count for k, count in counts.items()}
            cell = {"key": [method, batch, 0], "steps": steps, "decode_seconds": seconds}
            lines.append({"kind": "cell", **cell})
    lines.append({"kind": "cell", "key": ["none", 1, 0], "tokens_per_second": 9.0})
    file = tmp_path / "sweep.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measured(file, (0.6, 0.3, 0.1))
    assert max(found.errors) < 0.02 and len(found.cells) == 9
    assert found.hardware.steady(16, 5) == pytest.approx(TRUE.steady(16, 5), rel=0.05)
    assert {place.survival for place in found.places} == {(0.6, 0.3, 0.1)}


def test_too_few_steps_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "few.jsonl", [c for c in OURS if c[2] != 7])
    with pytest.raises(ValueError, match=r"few\.jsonl"):
        measured(file)
    assert main(["simulate", "--costs", str(file)]) == 1
    assert "few.jsonl" in capsys.readouterr().err


def test_adaptive_k_is_shown_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: traces()[name] for name in ["1-48-1, 48 requests a stage"]}
    monkeypatch.setattr("bench.simulate.replay_tables.traces", lambda: few)
    file = written(tmp_path / "steps.jsonl", OURS)
    assert main(["simulate", "--costs", str(file), "--steps", "20"]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| measured ")]
    assert len(rows) == 3
    assert "9 steps" in printed
    assert sum(line.startswith("| 1-48-1, 48 ") for line in printed.splitlines()) == 1
