"""The tensors of a draft head's files, and whether their values can be used.

Part of the verdict of `drafters.model.head_check`. Nothing imports torch here, unless a head is in
torch's own files.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters.model.config import HeadConfig
from drafters.model.head_check import MAPS, SELECTOR, UNUSED, plain_name, tensor_problems
from drafters.model.weight_files import StoredTensor, read_weights

# Type -> NumPy's integers of its size, all bits but the sign, and those of them that are set in
# infinity and NaN: the exponent's. (float8_e4m3fn has no infinity, and all are set in NaN.)
_EXPONENT = {
    "F8_E4M3": ("u1", 0x7F, 0x7F),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "F64": ("<u8", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
_CHUNK_BYTES = 2**24


def value_problems(folder: Path, config: HeadConfig) -> list[str]:
    """Tensors of a head whose values cannot be used. Reads every byte once, 16 MiB at a time.

    The folder's tensors must have no `tensor_problems`.
    """
    problems = []
    for name, parts in _values(folder):
        if name in MAPS:
            problem = _map_problem(config, [part for part, _ in parts]) if name == "d2t" else None
        else:
            broken = sum(count for _, count in parts)
            problem = f"has {broken:,} values that are not finite" if broken else None
        if problem:
            problems.append(f"{name} {problem}")
    return problems


def head_problems(folder: Path, config: HeadConfig) -> list[str]:
    """All that is wrong with a head's tensors. Raises OSError and ValueError for files that are
    missing or damaged."""
    stored = read_head(folder)
    return tensor_problems(config, stored) or value_problems(folder, config)


def read_head(folder: Path) -> dict[str, StoredTensor]:
    """The tensors that a folder's weight files describe, those of its path selector with the
    prefix `selector.`. Raises OSError and ValueError."""
    stored = dict(read_weights(folder).tensors)
    for file in [] if stored else torch_files(folder):
        stored |= {
            name: StoredTensor(_TORCH_TYPES.get(str(tensor.dtype), str(tensor.dtype)),
                               tuple(tensor.shape), file, 0, 0)
            for name, tensor in load_torch_file(file).items()
        }  # fmt: skip
    if not stored:
        raise ValueError(f"{folder} has neither *.safetensors nor *.bin")
    return stored | _selector(folder)


def _selector(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a head's path selector, which vLLM's loaders do not see in their folder."""
    try:
        tensors = read_weights(folder / SELECTOR).tensors
    except ValueError as error:
        raise ValueError(f"{SELECTOR}/: {error}") from None
    return {f"{SELECTOR}.{name}": tensor for name, tensor in tensors.items()}


_TORCH_TYPES = {
    f"torch.{name}": short
    for name, short in (
        ("float8_e4m3fn", "F8_E4M3"), ("bfloat16", "BF16"), ("float16", "F16"),
        ("float32", "F32"), ("float64", "F64"),
        ("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8"), ("uint8", "U8"),
        ("bool", "BOOL"),
    )
}  # fmt: skip


def torch_files(folder: Path) -> list[Path]:
    """The folder's weights in torch's own files. What a training run leaves beside them vLLM does
    not read either (model_loader/weight_utils.py, filter_files_not_needed_for_inference)."""
    states = ("training_args.bin", "optimizer.bin")
    return [file for file in sorted(folder.glob("*.bin")) if not file.name.endswith(states)]


def load_torch_file(file: Path) -> dict[str, Any]:
    """The tensors of one of torch's own files. Raises ValueError for one that holds other things,
    and OSError."""
    import torch

    try:
        try:
            found: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # of torch before 1.6: not a ZIP file, cannot be mapped
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file}: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no tensors by name")
    return found


Part = tuple[Any, int]  # integers of a map, or None; how many values are not finite


def _values(folder: Path) -> Iterator[tuple[str, Iterator[Part]]]:
    """(name, parts) of each tensor that is used."""
    tensors = read_weights(folder).tensors
    for name, tensor in (tensors | _selector(folder)).items():
        if not name.endswith(UNUSED):
            yield plain_name(name), _stored_parts(tensor)
    for file in [] if tensors else torch_files(folder):
        for name, values in load_torch_file(file).items():
            if not name.endswith(UNUSED):
                yield plain_name(name), _torch_parts(values)


def _stored_parts(tensor: StoredTensor) -> Iterator[Part]:
    import numpy

    kind, most, exponent = _EXPONENT.get(tensor.dtype, (_NUMPY_TYPES.get(tensor.dtype), 0, 0))
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        left = tensor.size
        while left:
            data = stream.read(min(left, _CHUNK_BYTES))
            left -= len(data)
            numbers = numpy.frombuffer(data, dtype=kind)
            if exponent:
                yield None, int(numpy.count_nonzero((numbers & most) >= exponent))
            else:
                yield numbers.astype("int64"), 0


_NUMPY_TYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1"}


def _torch_parts(values: Any) -> Iterator[Part]:
    for part in values.flatten().split(_CHUNK_BYTES):
        if part.is_floating_point():
            yield None, int((~part.float().isfinite()).sum())  # 8 bits have no isfinite
        else:
            yield part.long().numpy(), 0


def _map_problem(config: HeadConfig, parts: list[Any]) -> str | None:
    """What is wrong with d2t: target id of draft id i is i + d2t[i]."""
    import numpy

    offsets = numpy.concatenate(parts)
    if config.draft_vocab_size is None:
        full = bool(offsets.any())
        return "maps to other tokens, but draft_vocab_size is vocab_size" if full else None
    ids = offsets + numpy.arange(len(offsets))
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        return f"maps to tokens from {ids.min()} to {ids.max()}, of {config.vocab_size}"
    return None
