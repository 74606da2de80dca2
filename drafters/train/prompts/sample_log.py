"""Raw samples on disk, appended part by part, so that a killed run goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafters.train.prompts.sample import Sample, read_samples

PART = 256  # samples generated and written together: what a kill may cost


class SampleLog:
    """A file of samples and, beside it, the options that they were sampled with."""

    def __init__(self, file: Path, options: dict[str, Any]) -> None:
        """Open or begin the file; ValueError if it was sampled with other options."""
        self.file = file
        options = json.loads(json.dumps(options))  # tuples become lists, as in the file
        sidecar = file.with_suffix(".json")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            sidecar.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
            file.touch()
            return
        advice = "delete it, choose another --out, or only filter it with --samples"
        if not sidecar.exists():
            raise ValueError(f"{file} is there without {sidecar.name}, its options: {advice}")
        written = json.loads(sidecar.read_text("utf-8"))
        names = sorted({*options, *written})
        if other := [name for name in names if options.get(name) != written.get(name)]:
            raise ValueError(f"{file} was sampled with another {', '.join(other)}: {advice}")

    def resume(self, count: int) -> int:
        """Cut off what is no whole part of a run of `count` samples; the number that is left.

        Samples of a part depend on each other's lengths in a batch, so a part is kept or
        sampled again as a whole. The last part of a finished run may be a short one.
        """
        lines = self.file.read_bytes().splitlines(keepends=True)
        whole = sum(line.endswith(b"\n") for line in lines)
        if whole >= count:
            return count
        kept = whole - whole % PART
        os.truncate(self.file, sum(map(len, lines[:kept])))
        return kept

    def append(self, samples: Sequence[Sample]) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write("".join(sample.line() for sample in samples))
            stream.flush()
            os.fsync(stream.fileno())

    def read(self, count: int) -> list[Sample]:
        return read_samples([self.file])[:count]
