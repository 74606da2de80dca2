"""Which head a gateway was started with, and for which target: the generations of a folder descend
from it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

WEIGHTS = "model.safetensors"
_SAMPLE_BYTES, _SAMPLE_EVERY_BYTES = 2**16, 2**23  # of weights: 8 MB are read of a gigabyte
_DIGEST = re.compile(r"[0-9a-f]{64}")


def first_head(target: str, revision: str | None, head: str) -> str:
    """The target and its revision, and the head. What is a folder of this machine is named by its
    weights, as a container may have it elsewhere and another model may take its place; the hub's
    by their names. Reads the files; raises OSError."""
    return " ".join([_target_digest(Path(target)) or target, revision or "", _head(head)])


def older_first_head(target: str, revision: str | None, head: str) -> str:
    """What folders of learning say that were written when a target was known by its spelling."""
    return " ".join([target, revision or "", _head(head)])


def is_another_target(first_head: str, other: str) -> bool:
    """Whether two names are of heads for different targets."""
    return first_head.rpartition(" ")[0] != other.rpartition(" ")[0]


def is_another_head(first_head: str, folder: Path) -> bool:
    """Whether the weights in `folder` are others than those of `first_head`. False where that has
    no digest: a head of the hub is known by its name. Reads the file; raises OSError."""
    name = first_head.rpartition(" ")[2]
    return _DIGEST.fullmatch(name) is not None and _digest(folder) != name


def _head(name: str) -> str:
    return _digest(Path(name)) or name


def _target_digest(folder: Path) -> str | None:
    """The digest of a target's config and of samples of its weights; None if there are none in
    the folder. A start does not wait for gigabytes to be read, and a model that is trained further
    differs everywhere."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in [folder / "config.json", *files]:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            while sample := content.read(_SAMPLE_BYTES):
                digest.update(sample)
                content.seek(_SAMPLE_EVERY_BYTES - _SAMPLE_BYTES, os.SEEK_CUR)
    return digest.hexdigest()


def _digest(folder: Path) -> str | None:
    """The digest of the weights of the head in a folder; None if there are none."""
    weights = folder / WEIGHTS
    if not weights.is_file():
        return None
    with weights.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
