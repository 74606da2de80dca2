"""The files of captured sequences: each of one tenant, closed when they are large or old, and
deleted by age and size, and when their tenant is excluded.

    captured/20261127T194500-0001-search.jsonl     tenant "search"
    captured/20261127T194512-0002.jsonl            without keys

A file per tenant is what lets an operator delete a tenant's sequences, and what keeps a tenant that
sends much from driving out the others: the bytes that are kept are taken from whoever has most.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from drafters.learning.captured import SUFFIX

FILE_BYTES = 8 * 2**20  # a file is closed when it would get larger,
FILE_S = 3600.0  # and when it has been open for so long
FILES_OF_A_TENANT = 8  # at least, of what it may keep: so much is deleted at a time
FUTURE_S = 60.0  # a file that was written later than that from now has a wrong time


@dataclass
class _File:
    tenant: str
    size: int  # bytes
    written: float  # seconds since 1970


class CapturedFiles:
    """Appends sequences to a folder, and deletes the oldest files.

    Only one thread may use it. `budget` are the bytes that are kept at most, `keep_s` the seconds.
    `excluded` returns the tenants of whom nothing may be kept.
    """

    def __init__(
        self,
        folder: Path,
        budget: int,
        keep_s: float,
        excluded: Callable[[], Collection[str]] = frozenset,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._budget = budget
        self._keep_s = keep_s
        self._excluded = excluded
        self._clock = clock
        self._steady = steady
        self._files: dict[str, _File] = {}
        self._sizes: Counter[str] = Counter()  # tenant -> bytes of all its files
        self._open: dict[str, tuple[str, float]] = {}  # tenant -> its newest file, begun when
        self._number = 0

    @property
    def total_bytes(self) -> int:
        """Bytes in all files."""
        return self._sizes.total()

    def append(self, tenant: str, lines: bytes) -> None:
        """Append whole lines of a tenant, and delete first what has no room beside them.

        Raises OSError: then some of the lines may be there, and the next ones begin a new file.
        """
        while self._files and self.total_bytes + len(lines) > self._budget:
            self._delete(self._least_worth_keeping())
        name = self._file_for(tenant, len(lines))
        created = name not in self._files
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._folder / name, flags | (os.O_EXCL if created else 0), 0o600)
        entry = self._files.setdefault(name, _File(tenant, 0, self._clock()))
        rest = memoryview(lines)
        try:
            while rest:
                written = os.write(file, rest)
                entry.size += written
                self._sizes[tenant] += written
                rest = rest[written:]
        except OSError:
            del self._open[tenant]  # a line may be cut off there: nothing comes behind it
            raise
        finally:
            os.close(file)
        entry.written = self._clock()

    def tidy(self) -> None:
        """Look at the folder again, and delete what is an excluded tenant's, too old or too much.
        Raises OSError."""
        now, excluded, found = self._clock(), self._excluded(), dict[str, _File]()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if (file := self._found(entry, now)) is not None:
                        found[entry.name] = file
        self._files, self._sizes = found, Counter()
        for file in found.values():
            self._sizes[file.tenant] += file.size
        for name, file in list(found.items()):
            if file.tenant in excluded or now - file.written > self._keep_s:
                self._delete(name)
        while self.total_bytes > self._budget:
            self._delete(self._least_worth_keeping())

    @staticmethod
    def _found(entry: os.DirEntry[str], now: float) -> _File | None:
        """A file of sequences in the folder; None for anything else."""
        status = entry.stat(follow_symlinks=False)
        if not entry.name.endswith(SUFFIX) or stat.S_ISDIR(status.st_mode):
            return None
        written = status.st_mtime
        if written > now + FUTURE_S:  # or it would be kept longer than it may be
            os.utime(entry.path, (now, now), follow_symlinks=False)
            written = now
        return _File(_tenant_of(entry.name), status.st_size, written)

    def _file_for(self, tenant: str, size: int) -> str:
        """The name of the file that `size` further bytes of a tenant go to, which may be new."""
        name, begun = self._open.get(tenant, ("", 0.0))
        file = self._files.get(name)
        tenants = len(self._sizes.keys() | {tenant})
        most = min(FILE_BYTES, self._budget // (FILES_OF_A_TENANT * tenants))
        if file is not None and file.size + size <= most and self._steady() - begun < FILE_S:
            return name
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._clock()))
        while True:
            self._number = (self._number + 1) % 10_000  # four digits: operators match them
            name = f"{stamp}-{self._number:04d}{f'-{tenant}' if tenant else ''}{SUFFIX}"
            if not (self._folder / name).exists():
                break
        self._open[tenant] = (name, self._steady())
        return name

    def _least_worth_keeping(self) -> str:
        """The file that was written longest ago, of the tenant that has most bytes. The time in its
        name is no measure: the clock may have been wrong, and corrected since."""
        ((largest, _),) = self._sizes.most_common(1)
        names = (name for name, file in self._files.items() if file.tenant == largest)
        return min(names, key=lambda name: (self._files[name].written, name))

    def _delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)
        file = self._files.pop(name)
        self._sizes[file.tenant] -= file.size


def _tenant_of(name: str) -> str:
    parts = name.removesuffix(SUFFIX).split("-", 2)
    return parts[2] if len(parts) == 3 else ""
