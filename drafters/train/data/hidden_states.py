"""The target's hidden states of many texts: cached on disk up to a limit, else computed on demand.

A cache is two files in the folder. `states-<fingerprint>.bin` holds the texts' states one after
another, shortest text first; a text is its taps [n, taps * hidden] followed by its final states
[n, hidden]. `states-<fingerprint>.json` says how many texts are complete. It is replaced only once
the bytes that it counts are on disk, so that a run that dies leaves a cache short, never wrong.

Runs hold a lock on the .bin file: exclusive to write, shared to read. A cache that another run
has locked is neither written nor evicted.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from drafters.train.data.token_sequences import Texts, groups_within, pad
from drafters.train.target import FrozenTarget, States

BATCH_TOKENS = 8192  # padded tokens of one pass of the target
_FORMAT = 1
_FLUSH_BYTES = 64 * 2**20  # bytes between two updates of the index, the most that a kill loses
_INDEX_BYTES = 4096  # reserved below the limit for the index and its replacement
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StateStore:
    """Hidden states of `texts` at `taps`, from disk if cached, else from the target.

    The caches of all runs in `folder` together stay within `limit_bytes`: the least recently used
    are evicted. A limit of 0 means no cache and no file. `with_final` keeps final states too.
    """

    def __init__(
        self,
        target: FrozenTarget,
        texts: Texts,
        taps: Sequence[int],
        *,
        folder: Path,
        limit_bytes: int,
        with_final: bool,
        batch_tokens: int = BATCH_TOKENS,
        report: Callable[[str], None] = print,
    ) -> None:
        if not taps and not with_final:
            raise ValueError("neither taps nor final states: there is nothing to keep")
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes must not be negative, got {limit_bytes}")
        self._target, self._texts, self._taps = target, texts, tuple(taps)
        self._folder, self._limit, self._with_final = folder, limit_bytes, with_final
        self._batch_tokens, self._report = batch_tokens, report
        hidden, element = target.shape.hidden_size, target.dtype.itemsize
        self._taps_size, self._final_size = len(taps) * hidden, hidden if with_final else 0
        # Shortest first: the most texts fit, and a batch of similar lengths is cached as a whole.
        self._order: list[int] = texts.lengths.argsort(stable=True).tolist()
        sizes = texts.lengths[self._order] * (self._taps_size + self._final_size) * element
        self._ends: list[int] = [0, *sizes.cumsum(0).tolist()]  # bytes of the first i texts
        self._places = {text: place for place, text in enumerate(self._order)}
        self._file: int | None = None  # descriptor of the .bin file
        self.cached = 0

    @property
    def bytes(self) -> int:
        """Size of the cached states on disk."""
        return self._ends[self.cached]

    def prepare(self, progress: Callable[[int], None] | None = None) -> None:
        """Compute and write what fits; `progress` gets numbers of tokens, cached ones included.

        An existing cache is continued, or cut if the limit has become smaller.
        """
        self.close()
        if not self._limit:
            return
        room = self._evict(self._ends[-1] + _INDEX_BYTES) - _INDEX_BYTES
        planned = sum(end <= room for end in self._ends) - 1
        if planned < 1:
            _remove(self._path())
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file, alone = _open(self._path())
        if self._file is None:
            self._report(f"{self._path()} is being written by another run: not used by this one")
            return
        self._closing = weakref.finalize(self, os.close, self._file)
        found = self._complete()
        if alone:
            try:
                self._write(found, planned, progress)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_SH)
        else:
            self.cached = found
            if found < planned:
                self._report(f"{self._path()} is in use by another run: not continued")
            _tell(progress, self._tokens(range(found)))

    def fetch(self, indices: Sequence[int]) -> States:
        """Hidden states of these texts, padded with zeros on the right to the longest of them.

        They are on the target's device; `final` is [rows, n, 0] without `with_final`.
        """
        lengths = self._texts.lengths[list(indices)].tolist()
        shape, dtype = (len(indices), max(lengths)), self._target.dtype
        taps = torch.zeros((*shape, self._taps_size), dtype=dtype)
        final = torch.zeros((*shape, self._final_size), dtype=dtype)
        missing: list[int] = []  # rows
        for row, index in enumerate(indices):
            place = self._places[index]
            if place >= self.cached:
                missing.append(row)
                continue
            offset = self._ends[place]
            offset = self._read(taps[row, : lengths[row]], offset)
            self._read(final[row, : lengths[row]], offset)
        taps, final = taps.to(self._target.device), final.to(self._target.device)
        missing.sort(key=lengths.__getitem__)
        for rows in groups_within(missing, [lengths[row] for row in missing], self._batch_tokens):
            states = self._extract([indices[row] for row in rows])
            for place, row in enumerate(rows):
                length = lengths[row]
                taps[row, :length] = states.taps[place, :length]
                if self._with_final:
                    final[row, :length] = states.final[place, :length]
        return States(taps, final)

    def close(self) -> None:
        """Close the cache; all states are computed from now on."""
        if self._file is not None:
            self._closing()
            self._file, self.cached = None, 0

    def _extract(self, indices: Iterable[int]) -> States:
        tokens, _, _ = pad([self._texts[index] for index in indices])
        return self._target.states(tokens, self._taps)

    def _tokens(self, places: Iterable[int]) -> int:
        return int(self._texts.lengths[[self._order[place] for place in places]].sum())

    def _write(self, start: int, stop: int, progress: Callable[[int], None] | None) -> None:
        """Grow or cut the cache from its first `start` texts to its first `stop`."""
        assert self._file is not None
        self.cached = min(start, stop)
        _tell(progress, self._tokens(range(self.cached)))
        places = range(start, stop)
        lengths = self._texts.lengths[[self._order[place] for place in places]].tolist()
        flushed = done = start
        try:
            if start > stop:
                self._commit(stop)
            # Cut last: a file larger than its index says is harmless, a smaller one is not.
            os.ftruncate(self._file, self.bytes)
            for batch in groups_within(places, lengths, self._batch_tokens):
                states = self._extract(self._order[place] for place in batch)
                parts = [states.taps.cpu()] + [states.final.cpu()] * self._with_final
                for row, place in enumerate(batch):
                    length, offset = lengths[place - start], self._ends[place]
                    for part in parts:
                        offset = self._append(part[row, :length], offset)
                done = batch[-1] + 1
                if self._ends[done] - self._ends[flushed] >= _FLUSH_BYTES or done == stop:
                    self._commit(done)
                    flushed = done
                _tell(progress, self._tokens(batch))
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._report(
                f"{self._folder}: {error.strerror} after {self.bytes / 2**20:.0f} MiB of states; "
                f"{len(self._texts) - self.cached} of {len(self._texts)} texts are computed "
                "as needed"
            )
            os.ftruncate(self._file, self.bytes)

    def _commit(self, count: int) -> None:
        """Declare the first `count` texts complete."""
        assert self._file is not None
        os.fsync(self._file)
        document = {
            "format": _FORMAT,
            "fingerprint": self._fingerprint(),
            "texts": count,
            "bytes": self._ends[count],
        }
        _replace(self._path().with_suffix(".json"), json.dumps(document) + "\n")
        self.cached = count

    def _complete(self) -> int:
        """How many texts the cache holds; 0 if its index is missing, damaged or another's."""
        assert self._file is not None
        try:
            document = json.loads(self._path().with_suffix(".json").read_bytes())
            count, size = document["texts"], document["bytes"]
            known = (document["format"], document["fingerprint"]) == (_FORMAT, self._fingerprint())
            if known and 0 <= count <= len(self._texts) and size == self._ends[count]:
                return count if os.fstat(self._file).st_size >= size else 0
        except (OSError, ValueError, LookupError, TypeError):
            pass
        return 0

    def _append(self, states: torch.Tensor, offset: int) -> int:
        """Write [n, size] at `offset`, in bytes; returns the offset of its end."""
        assert self._file is not None
        view = memoryview(states.contiguous().view(torch.uint8).flatten().numpy())
        while view:
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count
        return offset

    def _read(self, states: torch.Tensor, offset: int) -> int:
        """Fill the contiguous [n, size] from `offset`, in bytes; returns the offset of its end."""
        assert self._file is not None
        if not states.numel():
            return offset
        view = memoryview(states.view(torch.uint8).flatten().numpy())
        while view:
            count = os.preadv(self._file, [view], offset)
            if not count:
                raise OSError(f"{self._path()} was cut while in use")
            view, offset = view[count:], offset + count
        return offset

    def _evict(self, wanted: int) -> int:
        """Delete other caches, least recently used first, until `wanted` bytes fit; returns how
        many do."""
        others = [file for file in self._folder.glob("states-*.bin") if file != self._path()]
        sizes = {file: sum(part.stat().st_size for part in _parts(file)) for file in others}
        for file in sorted(others, key=lambda file: file.stat().st_mtime):
            if sum(sizes.values()) + wanted <= self._limit:
                break
            if _remove(file):
                del sizes[file]
        return self._limit - sum(sizes.values())

    def _path(self) -> Path:
        return self._folder / f"states-{self._fingerprint()[:32]}.bin"

    def _fingerprint(self) -> str:
        """Hash of everything that the bytes of a cache depend on."""
        facts = [
            _FORMAT,
            self._target.fingerprint,
            self._texts.sha256,
            self._taps,
            str(self._target.dtype),
            self._with_final,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _tell(progress: Callable[[int], None] | None, tokens: int) -> None:
    if progress is not None and tokens:
        progress(tokens)


def _open(file: Path) -> tuple[int | None, bool]:
    """A locked descriptor, and whether the lock is exclusive; None if another run writes."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        alone = _lock(descriptor, fcntl.LOCK_EX)
        if not alone and not _lock(descriptor, fcntl.LOCK_SH):
            os.close(descriptor)
            return None, False
        try:
            if os.fstat(descriptor).st_ino == file.stat().st_ino:
                os.utime(file)  # most recently used, so evicted last
                return descriptor, alone
        except FileNotFoundError:
            pass
        os.close(descriptor)  # evicted between opening and locking


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parts(file: Path) -> Iterator[Path]:
    """The files of a cache that exist; the index first, because the rest is useless without it."""
    names = (file.with_suffix(".json"), file.with_suffix(".tmp"), file)
    return (name for name in names if name.exists())


def _remove(file: Path) -> bool:
    """Delete a cache unless a run holds it."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            return False
        for part in _parts(file):
            part.unlink()
        return True
    finally:
        os.close(descriptor)


def _replace(file: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one or the new one."""
    unfinished = file.with_suffix(".tmp")
    with unfinished.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, file)
