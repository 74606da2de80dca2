from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli import main as aerie
from drafters.learning.lineage import CANDIDATE, KEPT, REFUSED, REPLAY, ROLLED_BACK, Lineage

COMPARED = {"ratio": 1.082, "interval": [1.05, 1.11]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three generations: one kept and in force, one refused, one that waits for its trial."""
    folder = tmp_path / "dir"
    folder.mkdir()
    lineage = Lineage(folder)
    for verdict, reason in ((CANDIDATE, None), (REFUSED, "not better"), (CANDIDATE, None)):
        head = folder / "made"
        (head / "selector").mkdir(parents=True)
        (head / "config.json").write_text("{}")
        (head / "selector" / "model.safetensors").write_text("weights")
        lineage.add(head, {
            "verdict": verdict, "reason": reason, "parent": 0,
            "data": {"tokens": 50123, "to": "2026-11-27T20:00:00+00:00",
                     "tenants": {"acme corp": 50123}},
            "replay": {"captured": COMPARED, "mix": None, "tenants": {"acme corp": COMPARED}},
        })  # fmt: skip
    lineage.record_trial(1, {"verdict": KEPT, "ratio": 1.03, "interval": [1.01, 1.05]})
    lineage.put_in_force(1)
    return folder


def test_the_table_says_what_is_known_of_each(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert aerie(["heads", "list", str(folder)]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip("| ") for cell in row] for row in rows]
    assert [row[0] for row in cells[2:6]] == ["0", "1 (in force)", "2", "3"]
    assert cells[3][1:] == [
        "0", "50123", "2026-11-27T20:00:00+00:00", "1.082 (1.050 to 1.110)", "-",
        "1.030 (1.010 to 1.050)", "kept",
    ]  # fmt: skip
    assert cells[4][-1] == "refused: not better" and cells[5][-1] == "candidate"


def test_the_table_says_what_the_replay_kept(folder: Path, capsys: pytest.CaptureFixture[str]):
    """At K = 0 a trial has no pairs, and so no ratio."""
    record = {"verdict": KEPT, "by": REPLAY, "pairs": 0, "ratio": None, "interval": None}
    Lineage(folder).record_trial(3, record)
    assert aerie(["heads", "list", str(folder)]) == 0
    row = capsys.readouterr().out.splitlines()[5]
    assert [cell.strip("| ") for cell in row.split(" | ")][-2:] == ["-", "kept by the replay"]


def test_the_table_says_over_which_and_how_sure_a_ratio_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    lineage, trial = Lineage(folder), {"ratio": 1.03, "interval": [1.01, 1.05]}
    lineage.record_trial(1, {"verdict": KEPT, **trial, "confidence": 0.9875, "against": 0})
    assert aerie(["heads", "list", str(folder)]) == 0
    *rows, note = capsys.readouterr().out.splitlines()
    assert "1.030 (1.010 to 1.050, 98.75%) over 0" in rows[3]
    assert "1.082 (1.050 to 1.110) |" in rows[3]  # of a replay that does not say over which
    assert note.endswith("95% intervals if no other confidence is named")


def test_the_table_says_why_a_generation_could_not_be_tried(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    record = {"verdict": ROLLED_BACK, "refused": "its folder has no weights", "ratio": None}
    Lineage(folder).record_trial(3, record)
    assert aerie(["heads", "list", str(folder)]) == 0
    assert "rolled back: its folder has no weights" in capsys.readouterr().out.splitlines()[5]


def test_json_has_all(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert aerie(["heads", "list", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["in_force"], found["pinned"]) == (1, None)
    assert found["generations"][0]["trial"]["ratio"] == 1.03
    assert found["generations"][0]["provenance"]["replay"]["captured"] == COMPARED


def test_one_is_chosen_and_the_choice_given_back(folder: Path, capsys: pytest.CaptureFixture[str]):
    lineage = Lineage(folder)
    for choice, pinned in (("3", 3), ("0", 0), ("auto", None)):
        assert aerie(["heads", "use", str(folder), choice]) == 0
        assert lineage.pinned() == pinned
    for wrong in ("2", "9"):
        assert aerie(["heads", "use", str(folder), wrong]) == 2
        assert f"no generation {wrong}" in capsys.readouterr().err


def test_an_exported_head_names_no_tenant(folder: Path, tmp_path: Path):
    out = tmp_path / "not" / "there" / "out"
    left = Lineage(folder).generation(1).folder / ".provenance.json-left-by-a-kill"
    left.write_text('{"tenants": "acme"}')
    assert aerie(["heads", "export", str(folder), "1", str(out)]) == 0
    files = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert files == {"config.json", "selector/model.safetensors", "provenance.json"}
    record = (out / "provenance.json").read_text()
    assert "acme" not in record and json.loads(record)["replay"]["captured"] == COMPARED


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        ("0", "started with"),
        ("2", "the weights of generation 2, which was refused, are gone"),
        ("9", "no generation 9"),
    ],
)
def test_what_cannot_be_exported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str, problem: str
):
    assert aerie(["heads", "export", str(folder), number, str(tmp_path / "out")]) == 2
    assert problem in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert aerie(["heads", "export", str(folder), "1", str(tmp_path / "there")]) == 2


@pytest.mark.parametrize("action", [["list"], ["use", "0"], ["export", "1", "out"]])
def test_another_folder_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]
):
    """The fault: after a slip of the pen `use` said that a generation is pinned."""
    assert aerie(["heads", action[0], str(tmp_path), *action[1:]]) == 2
    assert f"{tmp_path} is no folder of --learn" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_is_named_in_a_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    damaged = folder / "in_force"
    damaged.write_text("{")
    assert aerie(["heads", "list", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"aerie: heads: {damaged} is damaged: ")
    damaged.unlink()
    damaged.mkdir()  # what another user's file would be for a user who is not root
    assert aerie(["heads", "list", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"aerie: heads: {damaged}: Is a directory"


def test_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert aerie(["heads", "list", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
