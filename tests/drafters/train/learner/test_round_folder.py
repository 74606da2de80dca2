"""What a round keeps of its attempts."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drafters.learning.json_file import replace_json
from drafters.learning.lineage import Lineage
from drafters.train.learner import round_folder
from drafters.train.learner.round_folder import SAVED, RoundFolder

DISK_BYTES = 1000


def fails(work: RoundFolder) -> bool:
    """Whether a further attempt is begun, which fails."""
    if begun := work.begin_attempt():
        work.count_failure()
    return begun


def test_a_choice_of_texts_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    """There is no plan yet: a target that cannot be loaded, for one."""
    work = RoundFolder(tmp_path)
    assert all(fails(work) for _ in range(10))
    assert not fails(work)
    assert work.since() > time.time() - 60  # what was captured until now is not new any more
    assert fails(work)


def test_a_clock_that_was_ahead_does_not_end_all_rounds(tmp_path: Path) -> None:
    work = RoundFolder(tmp_path)
    began = time.time()
    work.finish(began + 30 * 86_400)
    assert began <= work.since() <= time.time()
    first = work.since()
    assert RoundFolder(tmp_path).since() == first  # what comes from now on is new
    work.finish(5.0)
    assert work.since() == 5.0


def test_being_killed_is_no_failure(tmp_path: Path) -> None:
    """The fault: a service that was restarted ten times while a candidate was compared lost it."""
    work = RoundFolder(tmp_path)
    work.clear()
    work.begin({"until": 7.0})
    assert all(work.begin_attempt() for _ in range(30))
    assert work.plan() is not None


def test_failures_are_forgotten_while_training_comes_further(tmp_path: Path) -> None:
    work = RoundFolder(tmp_path)
    work.clear()
    work.begin({"until": 7.0})
    saved = work.round / f"{SAVED}trained.pt"
    for later in range(1, 30):
        assert work.begin_attempt()
        saved.touch()
        os.utime(saved, (time.time() + later, time.time() + later))
        work.count_failure()
    os.utime(saved, (0, 0))
    assert all(fails(work) for _ in range(9))
    assert not fails(work)


def test_each_phase_has_its_attempts(tmp_path: Path) -> None:
    work = RoundFolder(tmp_path)
    assert all(fails(work) for _ in range(9))
    work.clear()
    work.begin({"until": 7.0})
    assert all(fails(work) for _ in range(10))
    assert not fails(work)
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


def fill(file: Path) -> Path:
    """Write a file that leaves no room on the disk."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(DISK_BYTES))
    return file


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoundFolder:
    """A round that has begun, on a disk of DISK_BYTES."""

    def write(file: Path, content: Any) -> None:
        if sum(each.stat().st_size for each in tmp_path.rglob("*")
               if each.is_file()) > DISK_BYTES:  # fmt: skip
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_json(file, content)

    made = RoundFolder(tmp_path)
    made.clear()
    made.begin({"until": 7.0})
    monkeypatch.setattr(round_folder, "replace_json", write)
    return made


def test_half_a_file_of_saved_training_is_no_progress(work: RoundFolder) -> None:
    for later in range(1, 11):
        assert fails(work)
        unfinished = work.round / f"{SAVED}trained.pt.tmp"
        unfinished.touch()
        os.utime(unfinished, (time.time() + later, time.time() + later))
    assert not fails(work)


def test_what_a_failed_attempt_left_goes_before_anything_is_written(work: RoundFolder) -> None:
    """The fault: attempts could not be counted, so that the round was never given up."""
    (work.round / f"{SAVED}trained.pt").touch()
    left = [fill(work.round / f"{SAVED}trained.pt.tmp"), fill(work.round / "trained.new" / "head")]
    with pytest.raises(OSError, match="No space left"):
        work.begin_attempt()
    work.drop_leftovers()
    assert work.begin_attempt()
    assert not any(file.exists() for file in left)
    assert work.plan() is not None and (work.round / f"{SAVED}trained.pt").exists()


def test_what_lies_in_the_folder_without_a_plan_goes(tmp_path: Path) -> None:
    work = RoundFolder(tmp_path)
    fill(work.clear() / "texts.safetensors")
    work.drop_leftovers()
    assert not work.round.exists()


def test_a_round_ends_on_a_full_disk(work: RoundFolder) -> None:
    fill(work.round / "candidate" / "head")
    fill(work.round / f"{SAVED}trained.pt")
    work.finish(7.0)
    assert work.since() == 7.0 and work.plan() is None and not work.round.exists()


def test_a_round_whose_end_cannot_be_written_has_ended_later(
    work: RoundFolder, tmp_path: Path
) -> None:
    """Others fill the disk: its data are looked at once all the same, and its space is free."""
    others = fill(tmp_path / "others")
    large = fill(work.round / "candidate" / "head")
    with pytest.raises(OSError, match="No space left"):
        work.finish(7.0)
    assert work.plan() is not None and not large.exists()
    others.unlink()
    work.finish(7.0)
    assert work.since() == 7.0 and work.plan() is None


def run_child(folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Have a child go on with a round of a target that is not there."""
    for name in ("work", "head"):
        (folder / name).mkdir()
    work = RoundFolder(folder / "work")
    work.clear()
    work.begin({"until": 7.0})
    options = [str(folder), "--target", "none", "--head", str(folder / "head")]
    module = "drafters.train.learner.child"
    return subprocess.run(
        [sys.executable, "-m", module, *options, f"--child-of={os.getpid()}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **more,
    )


def test_a_child_counts_its_failure(tmp_path: Path) -> None:
    assert run_child(tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode == 1
    assert (tmp_path / "work" / "failures.json").read_text().strip() == "1"


def test_a_child_that_cannot_write_says_why_in_a_line(tmp_path: Path) -> None:
    child = run_child(
        tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    )
    assert child.returncode == 1
    assert child.stderr == "learner: OSError: [Errno 27] File too large\n"
