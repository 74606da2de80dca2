"""Captured sequences: the token ids of a prompt and its answer, and which drafts were accepted.

A file has one JSON object a line. Its last line may be cut off, by a kill or a full disk: readers
leave it out. Ids are base64 of little-endian 32-bit integers, which is half as long as digits and
read in one go. There is no text.
"""

from __future__ import annotations

import base64
import json
import math
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = "captured"
SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Captured:
    """A sequence that was served."""

    at: float  # seconds since 1970, when it ended
    tenant: str  # "" without keys
    generation: int  # of the head in force when it ended
    prompt: Sequence[int]  # token ids
    answer: Sequence[int]  # token ids
    # Of each engine step: draft tokens of the head, and how many drafts were accepted, of another
    # source where the head drafted none. A step makes one token more than it accepts. The last
    # steps of an answer may be missing, and the last one may have made more than the answer has.
    steps: Sequence[tuple[int, int]]

    def line(self) -> bytes:
        """The sequence as a line of a file, with its line feed."""
        entry = {
            "at": round(self.at, 3),
            "tenant": self.tenant,
            "generation": self.generation,
            "prompt": _encoded(self.prompt),
            "answer": _encoded(self.answer),
            "steps": _encoded([count for step in self.steps for count in step]),
        }
        return json.dumps(entry, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Captured:
        """The sequence in a line. Raises ValueError if the line is not one."""
        try:
            entry = json.loads(line)
            counts = _decoded(entry["steps"])
            return cls(
                at=float(entry["at"]),
                tenant=str(entry["tenant"]),
                generation=int(entry["generation"]),
                prompt=_decoded(entry["prompt"]),
                answer=_decoded(entry["answer"]),
                steps=list(zip(counts[::2], counts[1::2], strict=True)),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a captured sequence: {error!r}") from None


def read(folder: Path, since: float = -math.inf) -> Iterator[Captured]:
    """Every whole sequence in the files of `folder`, of the file first that was written longest
    ago; those alone that ended after `since`, in seconds since 1970.

    A file that is deleted meanwhile ends there. Lines that are no sequence are left out.
    """
    # The time in a name is that of a clock which may have been wrong, and corrected since.
    written = [(status.st_mtime, file) for file, status in files(folder).items()]
    for modified, file in sorted(written):
        if modified >= since:
            yield from (sequence for sequence in read_file(file) if sequence.at > since)


def files(folder: Path) -> dict[Path, os.stat_result]:
    """The files of captured sequences in `folder`, in no order."""
    found = {}
    for file in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            found[file] = file.stat()
    return found


def read_file(file: Path) -> Iterator[Captured]:
    """Every whole sequence in a file; none if it is deleted meanwhile."""
    try:
        lines = file.open("rb")
    except FileNotFoundError:
        return
    with lines:
        for line in lines:
            with suppress(ValueError):
                yield Captured.of_line(line)


def _encoded(ids: Sequence[int]) -> str:
    numbers = array("I", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def _decoded(text: str) -> array[int]:
    numbers = array("I")
    numbers.frombytes(base64.b64decode(text, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
