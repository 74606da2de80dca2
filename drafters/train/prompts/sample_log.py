"""Raw samples on disk, appended in parts, so that a killed run can continue where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drafters.train.prompts.sample import Sample, read_samples

PART = 256  # samples generated and written together, the most that a kill loses
_ADVICE = "delete it, choose another --out, or only filter it with --samples"


class SampleLog:
    """A file of samples and, beside it, the options that they were sampled with.

    The file is locked until `close`, or until the process ends.
    """

    def __init__(self, file: Path) -> None:
        """Open or create the file. Raises ValueError if another process has locked it, or if its
        options are missing."""
        self.file = file
        self._sidecar = file.with_suffix(".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = file.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.options = self._read_options()
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"another run is sampling into {file}: wait for it, or choose another --out"
            ) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock on the samples file."""
        self._stream.close()

    def _read_options(self) -> dict[str, Any]:
        """The options of existing samples; empty if there are none."""
        if not self.file.stat().st_size:
            return {}
        if not self._sidecar.exists():
            raise ValueError(
                f"{self.file} exists without its options, {self._sidecar.name}: {_ADVICE}"
            )
        options: dict[str, Any] = json.loads(self._sidecar.read_text("utf-8"))
        return options

    def begin(self, options: dict[str, Any]) -> None:
        """Record the options of this run. Raises ValueError if existing samples have others."""
        options = json.loads(json.dumps(options))  # tuples become lists, as in the file
        if not self.options:
            self._sidecar.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
            self.options = options
        names = sorted({*options, *self.options})
        if other := [name for name in names if options.get(name) != self.options.get(name)]:
            raise ValueError(f"{self.file} was sampled with another {', '.join(other)}: {_ADVICE}")

    def resume(self, count: int) -> int:
        """Cut the file to whole parts, for a run of `count` samples; returns the number left.

        The samples of a part depend on each other by the batch that they were generated in, so a
        part is kept or sampled again as a whole. The last part of a finished run may be shorter.
        """
        lines = self.file.read_bytes().splitlines(keepends=True)
        whole = sum(line.endswith(b"\n") for line in lines)
        if whole >= count:
            return count
        kept = whole - whole % PART
        os.truncate(self.file, sum(map(len, lines[:kept])))
        return kept

    def append(self, samples: Sequence[Sample]) -> None:
        """Append samples, and flush them to the disk."""
        self._stream.write("".join(sample.line() for sample in samples))
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def read(self, count: int) -> list[Sample]:
        """Read the first `count` samples of the file."""
        return read_samples([self.file])[:count]
