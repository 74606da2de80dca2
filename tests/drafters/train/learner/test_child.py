"""The learner's child: when it begins a round."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafters.learning.captured import FOLDER, Captured
from drafters.learning.first_head import WEIGHTS, first_head
from drafters.learning.lineage import Lineage
from drafters.train.learner.child import _NewTokens, _wait_for_data, _WaitLog
from drafters.train.learner.round_folder import RoundFolder
from tests.clock import Clock


def test_new_tokens_are_those_that_a_round_could_use_and_none_has_looked_at(tmp_path: Path):
    """The fault: a service that gives the same answers again and again began a round with each
    8,000 tokens of them."""
    (tmp_path / FOLDER).mkdir()

    def answered(at: float, prompt: int, tokens: int, tenant: str = "") -> bytes:
        return Captured(at, tenant, 0, [prompt, 2], [3] * tokens, []).line()

    new_tokens = _NewTokens(argparse.Namespace(folder=tmp_path, max_length=100))
    assert new_tokens.count(0.0) == 0
    file = tmp_path / FOLDER / "a.jsonl"
    file.write_bytes(answered(1000.0, 1, 20) + answered(1001.0, 2, 30) * 3)
    assert new_tokens.count(0.0) == 50
    assert new_tokens.count(1000.0) == 30
    with file.open("ab") as out:
        out.write(answered(1002.0, 1, 20) + answered(1003.0, 5, 1) + answered(1004.0, 6, 2000))
        out.write(answered(1005.0, 1, 20, tenant="b") + answered(time.time() + 1e6, 7, 20))
    assert new_tokens.count(1001.0) == 98 + 20
    assert new_tokens.count(1005.0) == 0


def test_a_file_that_did_not_change_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / FOLDER).mkdir()
    first, second = tmp_path / FOLDER / "a.jsonl", tmp_path / FOLDER / "b.jsonl"
    first.write_bytes(Captured(1000.0, "", 0, [1, 2], [3] * 20, []).line() * 5)
    second.write_bytes(Captured(1001.0, "", 0, [1, 2], [3] * 20, []).line())
    decoded, of_line = [], Captured.of_line
    monkeypatch.setattr(Captured, "of_line", lambda line: decoded.append(line) or of_line(line))
    new_tokens = _NewTokens(argparse.Namespace(folder=tmp_path, max_length=100))
    assert new_tokens.count(0.0) == 20
    assert len(decoded) == 6
    assert new_tokens.count(1000.5) == 0
    assert len(decoded) == 6
    with second.open("ab") as out:
        out.write(Captured(1002.0, "", 0, [5], [3] * 30, []).line())
    assert new_tokens.count(1000.5) == 30
    assert len(decoded) == 8
    first.unlink()
    assert new_tokens.count(1000.5) == 50


def test_the_log_says_what_is_left_out_when_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The fault: where prompts are long a learner waited for ever, and said why before any came."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / "work").mkdir()
    file, looks = tmp_path / FOLDER / "a.jsonl", []

    def sleep(_: float) -> None:
        looks.append(0)
        if len(looks) > 3:
            raise KeyboardInterrupt
        with file.open("ab") as out:
            out.write(Captured(1000.0 + len(looks), "", 0, [1] * 200, [3] * 20, []).line())

    monkeypatch.setattr(time, "sleep", sleep)
    args = argparse.Namespace(folder=tmp_path, max_length=100, new_tokens=40)
    with pytest.raises(KeyboardInterrupt):
        _wait_for_data(args, RoundFolder(tmp_path / "work"))
    nothing, left_out = capsys.readouterr().out.splitlines()
    assert nothing == "learner: waiting: 0 of 40 new tokens of answers"
    assert left_out.startswith(f"{nothing}; left out: 1 with prompts of more than 100 tokens")


def test_numbers_alone_are_said_again_after_a_while(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    log = _WaitLog(clock)
    for kind, reason, later in (
        ("tokens", "0", 0), ("tokens", "1", 15), ("trial", "2", 15), ("tokens", "3", 15),
        ("tokens", "3", 2000), ("tokens", "4", 15), ("tokens", "5", 15),
    ):  # fmt: skip
        clock.now += later
        log.say(kind, reason)
    said = [line.removeprefix("learner: waiting: ") for line in capsys.readouterr().out.split("\n")]
    assert said == ["0", "2", "3", "4", ""]


def test_a_learner_with_another_head_begins_no_round(tmp_path: Path) -> None:
    """The fault: with the `--head` of before, a learner elsewhere added generations under the head
    that the gateway was started with since."""
    for name in ("old", "new", "dir"):
        (tmp_path / name).mkdir()
    for name in ("old", "new"):
        (tmp_path / name / WEIGHTS).write_text(name)
    folder, work = tmp_path / "dir", tmp_path / "dir" / "work"
    work.mkdir()
    (folder / FOLDER).mkdir()
    sequence = Captured(1000.0, "", 0, [1, 2], [3] * 40, [])
    (folder / FOLDER / "a.jsonl").write_bytes(sequence.line())
    Lineage(folder).descend_from(first_head("a/target", None, str(tmp_path / "new")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "drafters.train.learner.child", str(folder)),
            *("--target", "a/target", "--head", str(tmp_path / "old"), "--new-tokens", "40"),
            f"--child-of={os.getpid()}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "the gateway was started with another head than --head" in done.stderr
    assert list(work.iterdir()) == [], "no attempt at a round, and its data is as new as it was"
