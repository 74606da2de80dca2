"""The learner's child: when it begins a round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from drafters.learning.captured import FOLDER, Captured
from drafters.learning.first_head import WEIGHTS, first_head
from drafters.learning.lineage import Lineage


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
