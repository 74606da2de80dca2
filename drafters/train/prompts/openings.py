"""Openings: given first words of user turns, which steer what the target asks about."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from drafters.train.prompts.filters import COMPLETION

_PROGRAMMER = (
    "You are a helpful programming assistant. The user asks for Python code, or for help with code."
)


@dataclass(frozen=True, slots=True)
class Opening:
    """How a share of the turns begins. Raises ValueError for values of wrong types."""

    text: str = ""  # the turn's first words, which the target continues
    system: str | None = None  # the system prompt before them; None: the template's own
    share: float = 1.0  # relative to the other openings
    kind: str = "chat"  # written to each prompt; "complete": `text` begins code to be completed

    def __post_init__(self) -> None:
        for name in ("text", "system", "kind"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (name == "system" and value is None)):
                raise ValueError(f"`{name}` must be a string, got {value!r}")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise ValueError(f"`share` must be a number, got {self.share!r}")
        if not 0.0 < self.share < float("inf"):
            raise ValueError(f"`share` must be positive, got {self.share}")


_CHAT = (Opening(share=0.5),)
_CODE = (
    Opening(system=_PROGRAMMER, share=0.12, kind="code"),
    Opening("Write a Python function", share=0.12, kind="code"),
    Opening("Write a Python", share=0.05, kind="code"),
    Opening("Complete the following Python function:\n```python\ndef", share=0.1, kind=COMPLETION),
    Opening("```python\ndef", share=0.06, kind=COMPLETION),
    Opening("from typing import List\n\n\ndef", share=0.05, kind=COMPLETION),
)
MIXES: dict[str, tuple[Opening, ...]] = {
    "chat+code": _CHAT + _CODE,
    "chat": _CHAT,
    "code": _CODE,
}
DEFAULT_MIX = "chat+code"


def read_openings(file: Path) -> tuple[Opening, ...]:
    """Openings from JSON lines, or from the tables `[[openings]]` of a .toml file."""
    if file.suffix == ".toml":
        document = tomllib.loads(file.read_text("utf-8"))
        if set(document) != {"openings"} or not isinstance(document["openings"], list):
            raise ValueError(f"{file}: a file of openings has [[openings]] and nothing else")
        entries = [(f"opening {place}", item) for place, item in enumerate(document["openings"], 1)]
    else:
        lines = enumerate(file.read_text("utf-8").split("\n"), start=1)
        entries = [(f"line {number}", line) for number, line in lines if line.strip()]
    openings = []
    for place, entry in entries:
        try:
            openings.append(_opening(json.loads(entry) if isinstance(entry, str) else entry))
        except ValueError as error:
            raise ValueError(f"{file}: {place}: {error}") from None
    if not openings:
        raise ValueError(f"{file}: not one opening")
    return tuple(openings)


def draw_openings(openings: Sequence[Opening], count: int, seed: int) -> list[int]:
    """Indices of `count` openings, drawn by their shares.

    A larger `count` begins with the same ones, so that a run can be extended.
    """
    weights = [opening.share for opening in openings]
    return random.Random(f"openings:{seed}").choices(range(len(openings)), weights, k=count)


def _opening(entry: Any) -> Opening:
    if not isinstance(entry, dict):
        raise ValueError(f"an opening is an object, got {entry!r}")
    if unknown := set(entry) - {field.name for field in fields(Opening)}:
        raise ValueError(f"unknown key {min(unknown)!r}")
    return Opening(**entry)
