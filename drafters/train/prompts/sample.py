"""Raw samples: what the target wrote in an open user turn, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled user turn, before any filter."""

    kind: str  # the kind of its opening: "chat", "code", ...
    opening: str  # the fixed text that the turn begins with
    text: str  # the turn so far, opening included, end token left out
    finish: Finish  # "length": the token limit cut it off
    tokens: int  # sampled tokens: the opening is not counted, the end token is

    def line(self) -> str:
        """The sample as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def read_samples(files: Sequence[Path]) -> list[Sample]:
    """All samples of the files, in order; unknown keys are ignored.

    A last line without a newline was cut off by a kill, and is left out. Any other line that is
    not a sample raises ValueError, which names file and line.
    """
    samples: list[Sample] = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break
            try:
                samples.append(_parse(line))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}:{number}: not a sample: {error}") from None
    return samples


def _parse(line: bytes) -> Sample:
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    fields = {"kind": str, "opening": str, "text": str, "finish": str, "tokens": int}
    for name, expected in fields.items():
        if not isinstance(document.get(name), expected):
            raise ValueError(f"`{name}` must be of type {expected.__name__}")
    if document["finish"] not in ("stop", "length"):
        raise ValueError(f"`finish` must be stop or length, got {document['finish']!r}")
    return Sample(**{name: document[name] for name in fields})
