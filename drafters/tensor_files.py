"""Write and read safetensors files, with errors that name the file.

The library's own error is neither an OSError nor a ValueError, and does not say which file it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a file atomically: a reader sees the old one or the whole new one. Raises OSError, as
    on a full disk; then nothing unfinished is left."""
    unfinished = file.with_name(f"{file.name}.tmp")
    try:
        save_file(dict(tensors), unfinished, metadata={"format": "pt"})
        os.replace(unfinished, file)
    except SafetensorError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{file} cannot be written: {error}") from None


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name. Raises OSError, and ValueError for a file that is damaged."""
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} holds no tensors: {error}") from None
