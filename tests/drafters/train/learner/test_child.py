"""The learner's child: when it begins a round."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from drafters.learning.captured import FOLDER, Captured
from drafters.learning.first_head import WEIGHTS, first_head
from drafters.learning.lineage import Lineage
from drafters.train.learner.child import _NewTokens


def test_new_tokens_are_those_that_a_round_could_use_and_none_has_looked_at(tmp_path: Path):
    """The fault: a service that gives the same answers again and again began a round with each
    20,000 tokens of them."""
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
