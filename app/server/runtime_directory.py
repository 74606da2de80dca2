"""The folder of one running gateway, and what gateways that were killed have left behind (Linux).

What the gateway's processes put among temporary files (sockets, files of compilers, folders of
`multiprocessing`) goes into a folder that the gateway makes when it starts and removes when it
ends. Shared memory has its place elsewhere, so the folder holds a list of it. A gateway that is
killed leaves both; the next one that starts for the same user removes them.

A gateway that runs holds a lock on its folder (flock(2)), and the engine's processes that it forks
hold it too. The system gives it up when the last of them ends, however that happens, so nobody has
to judge by process ids, which other containers on the same folder do not share.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from app.errors import StartupError

logger = logging.getLogger(__name__)

PREFIX = "aerie-gateway-"
LIST = "files.json"
SHARED_MEMORY = Path("/dev/shm")
# vLLM names a socket by a UUID in the folder, and the system takes names of 107 bytes (unix(7)).
MAX_SOCKET_FOLDER = 107 - len("/") - 36


class RuntimeDirectory:
    """A locked folder of this process, with the list of files that its processes have elsewhere."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._listed: list[tuple[str, int]] = []

    @classmethod
    def create(cls, base: Path) -> RuntimeDirectory:
        """Make a folder in `base` and lock it."""
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            try:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another start took it for left behind: not locked yet
                continue
            # Shared, so that a file system which maps it to fcntl(2) takes a folder, too.
            with contextlib.suppress(OSError):  # no locks: nobody else gets one either
                fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                return cls(path, lock)
            os.close(lock)

    def note(self, files: Iterable[Path]) -> None:
        """Write down all files outside the folder that are this gateway's."""
        listed = sorted(filter(None, map(_identity, files)))
        if listed == self._listed:
            return
        self._listed = listed
        new = self.path / f"{LIST}.new"
        try:
            new.write_text(json.dumps(listed))
            new.replace(self.path / LIST)
        except OSError as error:  # the disk is full: what was noted before still holds
            logger.warning("cannot note the files of the engine: %s", error)

    def remove(self) -> None:
        """Remove the folder and the listed files, and give up the lock."""
        _remove(self.path)
        os.close(self._lock)


@contextmanager
def runtime_directory() -> Iterator[RuntimeDirectory]:
    """Remove what killed gateways have left, and let this process and those that it starts have
    their temporary files in a folder that goes with it."""
    try:
        base = Path(tempfile.gettempdir())
        remove_leftovers(base)
        directory = RuntimeDirectory.create(base)
    except OSError as error:
        raise StartupError(
            f"no folder for temporary files: {error} (TMPDIR names another one)"
        ) from None
    tempdir, environ = tempfile.tempdir, dict(os.environ)
    tempfile.tempdir = str(directory.path)
    os.environ.update(_environment(base, directory.path, environ))
    try:
        yield directory
    finally:
        tempfile.tempdir = tempdir
        os.environ.clear()
        os.environ.update(environ)
        directory.remove()


def remove_leftovers(base: Path) -> None:
    """Remove the folders in `base` of this user's gateways that have ended, and the files that they
    list."""
    for path in base.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid != os.getuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it runs, or nobody can tell
            continue
        else:
            removed = _remove(path)
            logger.info("removed what a killed gateway left: %s and %d files", path, removed)
        finally:
            os.close(lock)


def _environment(base: Path, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What to set for `folder` to take the place of `base`, for all but what has been set."""
    changed = {"TMPDIR": str(folder)}
    if "TORCHINDUCTOR_CACHE_DIR" not in environ:  # where torch has it: a cache is for later starts
        changed["TORCHINDUCTOR_CACHE_DIR"] = str(base / f"torchinductor_{_user()}")
    if len(os.fsencode(folder)) > MAX_SOCKET_FOLDER and "VLLM_RPC_BASE_PATH" not in environ:
        changed["VLLM_RPC_BASE_PATH"] = str(base)
    return changed


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as containers have
        return f"uid_{os.getuid()}"


def _remove(folder: Path) -> int:
    """Remove a folder and the files that it lists; returns how many of those there were."""
    removed = 0
    with contextlib.suppress(OSError, TypeError, ValueError):  # no list, or not one of ours
        for name, inode in json.loads((folder / LIST).read_text()):
            # The name may be somebody else's by now.
            if _identity(Path(name)) == (name, inode):
                os.unlink(name)
                removed += 1
    shutil.rmtree(folder, ignore_errors=True)
    return removed


def _identity(path: Path) -> tuple[str, int] | None:
    """Name and inode of a segment of shared memory or a socket of this user, else None: nothing
    else is ever noted or removed."""
    try:
        status = path.lstat()
    except OSError:
        return None
    is_segment = path.parent == SHARED_MEMORY and stat.S_ISREG(status.st_mode)
    if status.st_uid != os.getuid() or not (is_segment or stat.S_ISSOCK(status.st_mode)):
        return None
    return str(path), status.st_ino
