"""The folder of learning: its owner's alone, and one gateway's at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from app.errors import SettingsError
from drafters.learning import WORK, captured, lineage, load_signal

logger = logging.getLogger(__name__)

LOCK = "gateway.lock"
LOCK_WITHIN_S = 5.0  # a gateway that was killed may take a moment to be gone
# What gateway and learner put there, and their drafts of files that are replaced.
_REPLACED = (
    *(lineage.IN_FORCE, lineage.PINNED, lineage.FIRST_HEAD, lineage.LOADING),
    lineage.TARGET_SINCE,
)
_NAMES = (captured.FOLDER, lineage.FOLDER, load_signal.NAME, *_REPLACED, WORK, LOCK)
_OURS = re.compile(rf"({'|'.join(map(re.escape, _NAMES))})|\.({'|'.join(_REPLACED)})-\w+")


class ClaimedFolder:
    """A folder of learning that this process has claimed, until it ends or calls `close`."""

    def __init__(self, name: str, wait_s: float = LOCK_WITHIN_S) -> None:
        """Make the folder, or take the one that is there. Raises SettingsError if it cannot be
        used: it is no folder or another user's, cannot be written, or is another gateway's.

        One that others may read becomes private if it holds nothing else, and is refused if it
        does: a home or a shared folder is not shut by a slip of the pen.
        """
        self.path = Path(os.path.abspath(name))
        try:
            _make_private(self.path)
            self.captured = self.path / captured.FOLDER
            _make_private(self.captured)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(self.path / LOCK, flags, 0o600)
        except OSError as error:
            raise SettingsError("learn", f"{error.filename}: {error.strerror}") from None
        try:
            self._claim(time.monotonic() + wait_s)
        except BaseException:
            self.close()
            raise

    def _claim(self, deadline: float) -> None:
        while True:
            try:  # not flock, which the engine's processes would inherit
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if not isinstance(error, BlockingIOError | PermissionError):
                    logger.warning("%s: no locks here: %s", self.path, error.strerror)
                    return
            if time.monotonic() >= deadline:
                raise SettingsError("learn", f"{self.path}: another gateway learns in this folder")
            time.sleep(0.1)

    def close(self) -> None:
        """Let another gateway have the folder."""
        os.close(self._lock)


def check_folder(name: str) -> None:
    """Raise SettingsError for a folder that ClaimedFolder would refuse, whether or not another
    gateway learns in it. Leaves everything as it is."""
    path = Path(os.path.abspath(name))
    try:
        for folder in (path, path / captured.FOLDER):
            with suppress(FileNotFoundError):
                _is_private(folder)
        existing = next(each for each in (path, *path.parents) if each.exists())
        with TemporaryDirectory(dir=existing):
            return
    except OSError as error:
        raise SettingsError("learn", f"{path}: {error.strerror}") from None


def _make_private(path: Path) -> None:
    """Make a folder for its owner alone. Raises OSError, and SettingsError for one that must not
    be used."""
    try:
        private = _is_private(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        return
    if not private:
        path.chmod(0o700)
        logger.info("%s was open to others: it is its owner's alone now", path)


def _is_private(path: Path) -> bool:
    """Whether a folder is its owner's alone. Raises OSError, and SettingsError for one that must
    not be used."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise SettingsError("learn", f"{path} is {what}: name a folder itself")
    if found.st_uid != os.geteuid():
        raise SettingsError(
            "learn",
            f"{path} belongs to user {found.st_uid}, and the gateway runs as user {os.geteuid()}: "
            "name a folder of its own, such as one inside of it",
        )
    if not found.st_mode & 0o077:
        return True
    if foreign := [name for name in os.listdir(path) if not _is_ours(path, name)]:
        raise SettingsError(
            "learn",
            f"{path} is open to others, and has {sorted(foreign)[0]} in it, which is not of "
            "learning: name a folder of its own, or make it private (chmod 700)",
        )
    return False


def _is_ours(folder: Path, name: str) -> bool:
    if folder.name == captured.FOLDER and name.endswith(captured.SUFFIX):
        return True
    return _OURS.fullmatch(name) is not None
