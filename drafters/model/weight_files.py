"""Safetensors files of a model folder: are they all there, and whole? No tensor is read.

Without torch: the gateway looks at them before it has an engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_NAMED = 3  # names in an error message; the others are counted


class MissingShardError(ValueError):
    """A file that holds a part of the weights is not in the folder."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    dtype: str  # as the format calls it: BF16, F32, I64
    shape: tuple[int, ...]
    file: Path
    offset: int  # of its first byte in the file
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Weights:
    """What the headers of a folder's weight files say."""

    tensors: dict[str, StoredTensor]  # by name
    size: int  # bytes of all files


def read_weights(folder: Path) -> Weights:
    """Read the headers of the files that vLLM would load, and compare them with the files' sizes.

    Raises ValueError naming a file that is truncated or no safetensors file, MissingShardError
    naming the files that are not there, and OSError for files that cannot be read.
    """
    files, index = _files(folder)
    tensors: dict[str, StoredTensor] = {}
    shard_of: dict[str, str] = {}
    for file in files:
        found = _read_header(file)
        tensors.update(found)
        shard_of.update(dict.fromkeys(found, file.name))
    if index is not None:
        _check_tensors(index.name, _weight_map(index), shard_of)
    return Weights(tensors, sum(file.stat().st_size for file in files))


def _files(folder: Path) -> tuple[list[Path], Path | None]:
    """The files that vLLM's default loader picks, and their index if there is one."""
    # Mistral's layout lies beside the usual one and is taken where it exists.
    for pattern, name in (
        ("consolidated*.safetensors", "consolidated.safetensors.index.json"),
        ("*.safetensors", "model.safetensors.index.json"),
    ):
        files = sorted(folder.glob(pattern))
        if not files:
            continue
        index = folder / name
        if not index.is_file():
            _check_numbering(files)
            return files, None
        listed = set(_weight_map(index).values())
        if missing := sorted(listed - {file.name for file in files}):
            raise MissingShardError(f"{_some(missing)} missing (listed in {name})")
        return [file for file in files if file.name in listed], index
    return [], None


def _check_numbering(files: Iterable[Path]) -> None:
    """Files named `model-00001-of-00003.safetensors` say how many there are."""
    names = {file.name for file in files}
    expected = set()
    for name in names:
        if found := _SHARD.fullmatch(name):
            stem, _, count = found.groups()
            expected |= {
                f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)
            }
    if missing := sorted(expected - names):
        raise MissingShardError(f"{_some(missing)} missing (by the count in the other names)")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file name, from an index file."""
    try:
        content = json.loads(index.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{index.name} is not JSON: {error}") from None
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(f"{index.name} has no weight_map of tensors to files")
    return found


def _check_tensors(index: str, listed: dict[str, str], shard_of: dict[str, str]) -> None:
    for tensor, shard in listed.items():
        if shard_of.get(tensor) != shard:
            raise ValueError(f"{shard} has no tensor {tensor}, which {index} says it has")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file whose header describes every byte of it.

    The format is 8 bytes with the header's length, the header as JSON, the tensors' bytes one
    behind the other.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 0 < header_size <= _MAX_HEADER_BYTES:
            hint = ": a pointer of a large-file store?" if size < 1024 else ""
            raise ValueError(f"{file.name} is not a safetensors file{hint}")
        start = 8 + header_size
        if size < start:
            raise ValueError(
                f"{file.name} is truncated: {size:,} bytes, its header alone has {header_size:,}"
            )
        try:
            header = json.loads(stream.read(header_size))
            header.pop("__metadata__", None)
            tensors = {name: _stored(entry, file, start) for name, entry in header.items()}
            end = start + _data_size(entry["data_offsets"] for entry in header.values())
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{file.name} has a damaged header") from None
    if size < end:
        raise ValueError(f"{file.name} is truncated: {size:,} bytes of {end:,}")
    if size > end:
        raise ValueError(f"{file.name} has {size:,} bytes, its header describes {end:,}")
    return tensors


def _stored(entry: Mapping[str, Any], file: Path, start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return StoredTensor(str(entry["dtype"]), shape, file, start + begin, end - begin)


def _data_size(spans: Iterable[tuple[int, int]]) -> int:
    """Where the last tensor ends. Raises ValueError for gaps and overlaps."""
    position = 0
    for start, end in sorted(spans):
        if start != position or end < start:
            raise ValueError
        position = end
    return position


def _some(names: list[str]) -> str:
    """Subject and verb of a sentence: `a is`, `a and b are`, `a, b, c and 5 more are`."""
    shown = names[:_NAMED]
    if more := len(names) - len(shown):
        shown.append(f"{more} more")
    *first, last = shown
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"
