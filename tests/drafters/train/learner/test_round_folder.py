"""What a round keeps of its attempts."""

from __future__ import annotations

import os
import time
from pathlib import Path

from drafters.learning.lineage import Lineage
from drafters.train.learner.round_folder import SAVED, RoundFolder


def test_a_choice_of_texts_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    """There is no plan yet: a target that cannot be loaded, for one."""
    work = RoundFolder(tmp_path)
    assert all(work.count_attempt() for _ in range(10))
    assert not work.count_attempt()
    assert work.since() > time.time() - 60  # what was captured until now is not new any more
    assert work.count_attempt()


def test_a_clock_that_was_ahead_does_not_end_all_rounds(tmp_path: Path) -> None:
    work = RoundFolder(tmp_path)
    began = time.time()
    work.finish(began + 30 * 86_400)
    assert began <= work.since() <= time.time()
    first = work.since()
    assert RoundFolder(tmp_path).since() == first  # what comes from now on is new
    work.finish(5.0)
    assert work.since() == 5.0


def test_being_killed_is_no_failure_while_training_comes_further(tmp_path: Path) -> None:
    work = RoundFolder(tmp_path)
    work.clear()
    work.begin({"until": 7.0})
    saved = work.round / f"{SAVED}trained.pt"
    for later in range(1, 30):
        assert work.count_attempt()
        saved.touch()
        os.utime(saved, (time.time() + later, time.time() + later))
    os.utime(saved, (0, 0))
    assert all(work.count_attempt() for _ in range(9))
    assert not work.count_attempt()


def test_each_phase_has_its_attempts(tmp_path: Path) -> None:
    work = RoundFolder(tmp_path)
    assert all(work.count_attempt() for _ in range(9))
    work.clear()
    work.begin({"until": 7.0})
    assert all(work.count_attempt() for _ in range(10))
    assert not work.count_attempt()
    assert work.since() == 7.0
    assert work.plan() is None


def test_a_round_of_another_first_head_does_not_go_on(tmp_path: Path) -> None:
    lineage, work = Lineage(tmp_path), RoundFolder(tmp_path / "work")
    work.round.parent.mkdir()
    lineage.descend_from("a target and a head")
    work.clear()
    work.begin({"until": 7.0})
    assert RoundFolder(tmp_path / "work").plan() is not None
    lineage.descend_from("another target and a head")
    assert RoundFolder(tmp_path / "work").plan() is None
    assert work.since() == 0.0  # what was captured is as new as it was
