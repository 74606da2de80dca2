from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from drafters.learning.json_file import replace_json
from drafters.learning.lineage import CANDIDATE, KEPT, REFUSED, ROLLED_BACK, Lineage


def head(folder: Path) -> Path:
    place = folder / "made"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_text("weights")
    return place


def test_generations_are_numbered_and_keep_what_is_known_of_them(tmp_path: Path):
    lineage = Lineage(tmp_path)
    assert lineage.generations() == [] and lineage.in_force() == 0 and lineage.pinned() is None
    first = lineage.add(head(tmp_path), {"verdict": CANDIDATE, "steps": 40})
    second = lineage.add(head(tmp_path), {"verdict": CANDIDATE})
    assert [first.number, second.number] == [1, 2]
    assert (first.folder / "model.safetensors").read_text() == "weights"
    assert first.provenance["steps"] == 40 and first.verdict == CANDIDATE
    lineage.record_trial(1, {"verdict": KEPT, "ratio": 1.1})
    lineage.put_in_force(1)
    again = Lineage(tmp_path)
    assert again.generation(1).verdict == KEPT and again.in_force() == 1
    assert again.generation(2).verdict == CANDIDATE
    with pytest.raises(KeyError):
        again.generation(3)


def test_of_a_refused_head_only_its_provenance_is_kept(tmp_path: Path):
    lineage = Lineage(tmp_path)
    refused = lineage.add(head(tmp_path), {"verdict": REFUSED})
    assert [file.name for file in refused.folder.iterdir()] == ["provenance.json"]
    assert not (tmp_path / "made").exists()
    with pytest.raises(KeyError):
        lineage.pin(refused.number)


def test_a_pin_holds_until_it_is_taken_out(tmp_path: Path):
    lineage = Lineage(tmp_path)
    lineage.add(head(tmp_path), {"verdict": CANDIDATE})
    lineage.pin(1)
    assert Lineage(tmp_path).pinned() == 1
    lineage.pin(0)
    assert Lineage(tmp_path).pinned() == 0
    lineage.pin(None)
    assert Lineage(tmp_path).pinned() is None
    with pytest.raises(KeyError):
        lineage.pin(9)


def test_what_a_kill_left_half_done_is_no_generation(tmp_path: Path):
    (tmp_path / "generations" / "0001").mkdir(parents=True)  # no provenance
    (tmp_path / "generations" / ".refused-x").mkdir()
    assert Lineage(tmp_path).generations() == []
    # Files for their owner alone, and nothing temporary is left.
    lineage = Lineage(tmp_path)
    lineage.put_in_force(2)
    (file,) = [file for file in tmp_path.iterdir() if file.is_file()]
    assert file.name == "in_force" and file.stat().st_mode & 0o777 == 0o600
    (tmp_path / "generations" / "0001").rmdir()
    lineage.add(head(tmp_path), {"verdict": REFUSED})
    assert not list((tmp_path / "generations").glob(".*"))


def test_a_generation_in_force_that_was_removed_is_not_in_force(tmp_path: Path):
    lineage = Lineage(tmp_path)
    lineage.put_in_force(lineage.add(head(tmp_path), {"verdict": KEPT}).number)
    assert lineage.in_force() == 1
    known = lineage.generation(1)
    assert known.has_weights
    shutil.rmtree(tmp_path / "generations" / "0001")
    assert lineage.in_force() == 0
    assert not known.has_weights  # of one that was looked at before
    assert lineage.add(head(tmp_path), {"verdict": KEPT}).number == 2  # no number twice


def test_candidates_of_another_first_head_do_not_wait_for_a_trial(tmp_path: Path):
    lineage = Lineage(tmp_path)
    assert not lineage.descend_from("a target and a head")
    for verdict in (CANDIDATE, REFUSED, CANDIDATE):
        lineage.add(head(tmp_path), {"verdict": verdict})
    lineage.record_trial(1, {"verdict": KEPT})
    assert not lineage.descend_from("a target and a head")
    assert lineage.generation(3).verdict == CANDIDATE
    assert lineage.descend_from("a target and a better head")
    assert lineage.first_head() == "a target and a better head"
    assert [item.verdict for item in lineage.generations()] == [KEPT, REFUSED, ROLLED_BACK]
    assert lineage.generation(3).has_weights  # an operator may still choose it


def test_what_an_older_version_called_the_first_head_is_no_other_one(tmp_path: Path):
    lineage = Lineage(tmp_path)
    lineage.descend_from("./model  digest")
    lineage.put_in_force(lineage.add(head(tmp_path), {"verdict": KEPT}).number)
    assert not lineage.descend_from("content  digest", lambda: "./model  digest")
    assert (lineage.first_head(), lineage.in_force()) == ("content  digest", 1)
    assert lineage.descend_from("content  other", lambda: "./model  other")
    assert lineage.target_since() == 0.0, "another head, and the same target"
    before = time.time()
    assert lineage.descend_from("changed  other", lambda: "./model  other")
    assert before <= lineage.target_since() <= time.time()


def test_a_target_that_came_in_the_future_came_now(tmp_path: Path):
    """Catches: a time that a wrong clock wrote, before which nothing that is captured is new."""
    lineage = Lineage(tmp_path)
    replace_json(tmp_path / "target_since", time.time() + 1e6)
    before = time.time()
    since = lineage.target_since()
    assert before <= since <= time.time()
    assert lineage.target_since() == since, "it moves on with the clock"


def test_a_clock_that_is_a_little_ahead_is_believed(tmp_path: Path):
    """The gateway is on another machine. Catches: answers of the target before counted as new."""
    replace_json(tmp_path / "target_since", since := time.time() + 60.0)
    assert Lineage(tmp_path).target_since() == since


def test_weights_of_old_generations_are_deleted_and_what_is_known_of_them_stays(tmp_path: Path):
    lineage = Lineage(tmp_path)
    for _ in range(6):
        made = head(tmp_path)
        (made / "selector").mkdir()
        (made / "selector" / "model.safetensors").write_text("weights")
        lineage.add(made, {"verdict": CANDIDATE})
    lineage.record_trial(2, {"verdict": KEPT})
    lineage.put_in_force(1)
    lineage.pin(3)
    lineage.prune(keep=2)
    assert [item.number for item in lineage.generations() if item.has_weights] == [1, 3, 5, 6]
    assert lineage.generation(2).verdict == KEPT
    assert {file.name for file in lineage.generation(4).folder.iterdir()} == {"provenance.json"}
    with pytest.raises(KeyError):
        lineage.pin(2)


def test_generations_that_were_refused_do_not_take_the_place_of_those_with_weights(tmp_path: Path):
    lineage = Lineage(tmp_path)
    for verdict in (CANDIDATE, CANDIDATE, CANDIDATE, REFUSED, REFUSED):
        lineage.add(head(tmp_path), {"verdict": verdict})
    lineage.prune(keep=2)
    assert [item.number for item in lineage.generations() if item.has_weights] == [2, 3]


def test_numbers_of_five_digits_come_after_those_of_four(tmp_path: Path):
    """The fault: 10000 is before 9999 in a list of texts, so that the newest was pruned."""
    lineage = Lineage(tmp_path)
    (tmp_path / "generations").mkdir()
    (tmp_path / "generations" / "newest").write_text("9998")
    assert lineage.add(head(tmp_path), {"verdict": KEPT}).number == 9999
    assert lineage.add(head(tmp_path), {"verdict": CANDIDATE}).number == 10000
    lineage.prune(keep=1)
    assert [item.number for item in lineage.generations()] == [9999, 10000]
    assert [item.number for item in lineage.generations() if item.has_weights] == [10000]


@pytest.mark.parametrize("content", ["", "[]", '{"verdict": "ke', "{}"])
def test_a_damaged_record_stops_nothing_else(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
):
    """The fault: an empty record of one generation, and none of them could be read any more."""
    lineage = Lineage(tmp_path)
    for _ in range(3):
        lineage.add(head(tmp_path), {"verdict": CANDIDATE})
    trial = tmp_path / "generations" / "0001" / "trial.json"
    trial.write_text(content)
    (tmp_path / "generations" / "0002" / "provenance.json").write_text(content)
    for _ in range(2):
        assert [(item.number, item.trial) for item in lineage.generations()] == [
            (1, None), (3, None),
        ]  # fmt: skip
    assert len(caplog.messages) == 2 and str(trial) in caplog.messages[0]
    with pytest.raises(KeyError):
        lineage.pin(2)
    lineage.pin(3)
    lineage.record_trial(1, {"verdict": KEPT})
    assert lineage.generation(1).verdict == KEPT


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "in_force").write_text("")
    with pytest.raises(ValueError, match=f"{tmp_path / 'in_force'} is damaged"):
        Lineage(tmp_path).in_force()
