"""Which head a gateway was started with, and for which target: the generations of a folder descend
from it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

WEIGHTS = "model.safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def first_head(target: str, revision: str | None, head: str) -> str:
    """The target's name and revision, and the head's name and, where it is a folder of this
    machine, the digest of its weights. Reads the file; raises OSError."""
    # What it is called does not matter then: a container may have it elsewhere.
    return " ".join([target, revision or "", _digest(Path(head)) or head])


def is_another_head(first_head: str, folder: Path) -> bool:
    """Whether the weights in `folder` are others than those of `first_head`. False where that has
    no digest: a head of the hub is known by its name. Reads the file; raises OSError."""
    name = first_head.rpartition(" ")[2]
    return _DIGEST.fullmatch(name) is not None and _digest(folder) != name


def _digest(folder: Path) -> str | None:
    """The digest of the weights of the head in a folder; None if there are none."""
    weights = folder / WEIGHTS
    if not weights.is_file():
        return None
    with weights.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
