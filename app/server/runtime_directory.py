"""The runtime directory of a gateway, and the removal of those that killed gateways left (Linux).

Temporary files of the gateway's processes (sockets, files of compilers, folders of
`multiprocessing`) go into a folder that the gateway makes when it starts and removes when it ends.
Shared memory lies elsewhere, so the folder holds a list of it. A killed gateway leaves both; the
next one that starts for the same user removes them.

A running gateway holds a lock on its folder (flock(2)), and so do the engine's processes that it
forks. The kernel releases it when the last of them ends, however that happens. Process ids would
not do: containers that share the folder do not share them.
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
            except FileNotFoundError:  # another gateway removed it, as it was not locked yet
                continue
            # Shared: a file system that maps this to fcntl(2) locks folders no other way.
            with contextlib.suppress(OSError):  # no locks here: no other gateway gets one either
                fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                return cls(path, lock)
            os.close(lock)

    def note(self, files: Iterable[Path]) -> None:
        """Record all files of this gateway outside its folder, in place of those noted before."""
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
    """Make the folder for temporary files of this process and those that it starts.

    It is removed at the end; those that killed gateways have left are removed first. Raises
    StartupError if no folder can be made.
    """
    try:
        base = Path(tempfile.gettempdir())
        remove_leftovers(base)
        directory = RuntimeDirectory.create(base)
    except OSError as error:
        raise StartupError(
            f"no folder for temporary files: {error} (set TMPDIR to another one)"
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
        except OSError:  # its gateway runs, or there are no locks here
            continue
        else:
            removed = _remove(path)
            logger.info("removed what a killed gateway left: %s and %d files", path, removed)
        finally:
            os.close(lock)


def _environment(base: Path, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that put temporary files into `folder` instead of `base`; others stay as set."""
    changed = {"TMPDIR": str(folder)}
    if "TORCHINDUCTOR_CACHE_DIR" not in environ:  # torch's default: later starts use this cache
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
            # Another process may have the name by now.
            if _identity(Path(name)) == (name, inode):
                os.unlink(name)
                removed += 1
    shutil.rmtree(folder, ignore_errors=True)
    return removed


def _identity(path: Path) -> tuple[str, int] | None:
    """Name and inode of a shared memory segment or socket of this user, None for any other file.

    Nothing else is ever noted or removed.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    is_segment = path.parent == SHARED_MEMORY and stat.S_ISREG(status.st_mode)
    if status.st_uid != os.getuid() or not (is_segment or stat.S_ISSOCK(status.st_mode)):
        return None
    return str(path), status.st_ino
