"""The folder of learning: made private, or refused with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import SettingsError
from app.learning.folder import LOCK, ClaimedFolder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = ClaimedFolder(str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    assert folder.path == tmp_path / "a" / "b"
    assert mode(folder.path) == mode(folder.captured) == 0o700
    assert mode(folder.path / LOCK) == 0o600
    folder.close()


def test_a_folder_of_learning_that_others_may_read_becomes_private(tmp_path: Path) -> None:
    ClaimedFolder(str(tmp_path / "learn")).close()
    for name in (
        "in_force",
        "loading",
        "target_since",
        ".pinned-x1_y",
        "load",
        "captured/20260101T000000-0001-a.jsonl",
    ):
        (tmp_path / "learn" / name).touch()
    for folder in (tmp_path / "learn", tmp_path / "learn" / "captured"):
        folder.chmod(0o755)
    ClaimedFolder(str(tmp_path / "learn")).close()
    assert mode(tmp_path / "learn") == mode(tmp_path / "learn" / "captured") == 0o700


@pytest.mark.parametrize("name", [".bashrc", "notes", "captured/notes"])
def test_a_folder_with_other_things_in_it_is_not_shut_to_others(tmp_path: Path, name: str) -> None:
    (tmp_path / "captured").mkdir(mode=0o755)
    (tmp_path / name).touch()
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match=f"open to others, and has {Path(name).name}"):
        ClaimedFolder(str(tmp_path))
    assert mode(tmp_path / Path(name).parent) == 0o755
    tmp_path.chmod(0o700)  # its owner has shut it
    (tmp_path / "captured").chmod(0o700)
    ClaimedFolder(str(tmp_path)).close()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "private" / "captured").symlink_to(tmp_path)
    with pytest.raises(SettingsError, match="file is no folder"):
        ClaimedFolder(str(tmp_path / "file"))
    for name in ("link", "private"):
        with pytest.raises(SettingsError, match="symbolic link"):
            ClaimedFolder(str(tmp_path / name))
    with pytest.raises(SettingsError, match="Not a directory"):
        ClaimedFolder(str(tmp_path / "file" / "below"))


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "learn").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SettingsError, match=f"belongs to user {os.getuid()}, and the gateway"):
        ClaimedFolder(str(tmp_path / "learn"))


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid():
        (tmp_path / "learn").mkdir(mode=0o500)
        with pytest.raises(SettingsError, match="Permission denied"):
            ClaimedFolder(str(tmp_path / "learn"))
    else:  # who may write anywhere, but to /proc
        monkeypatch.setattr(Path, "lstat", lambda _: os.stat(tmp_path / "missing"))
        with pytest.raises(SettingsError, match="/proc/learn"):
            ClaimedFolder("/proc/learn")


CLAIM = "import sys; from app.learning.folder import ClaimedFolder; ClaimedFolder(sys.argv[1], 0.3)"


def test_two_gateways_do_not_learn_in_one_folder(tmp_path: Path) -> None:
    def claim_elsewhere() -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", CLAIM, str(tmp_path / "learn")]
        return subprocess.run(command, capture_output=True, check=False)

    folder = ClaimedFolder(str(tmp_path / "learn"))
    refused = claim_elsewhere()
    assert b"another gateway learns in this folder" in refused.stderr
    child = subprocess.Popen(["sleep", "30"], close_fds=False)  # a process of the engine
    folder.close()
    assert claim_elsewhere().returncode == 0
    child.kill()
    child.wait()
