"""The data type of weights on a CPU: the one in which a step of 1 to 12 rows is the fastest.

A decoding step multiplies one row for each running request, and one more for each draft that it
verifies. Where bfloat16 is fast for one row only, no drafter can win in it, and float32 is
the better type even though a single request decodes a little slower in it.
docs/decisions/0019-weights-dtype-on-a-cpu.md has the figures.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 6, 8, 12)
FLOAT32_SHARE = 0.5  # of free memory: the KV cache, the head and the processes need the rest
# Types of two bytes, and the features of an x86 processor that compute in them or convert them.
# With none of these, each weight is converted to float32 for each product.
NARROW = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "avx10_2", "avx_ne_convert"),
    "float16": ("avx512_fp16", "amx_fp16", "avx10_2", "avx_ne_convert"),
}

# The choices of this process, by what an operator or a checkpoint decides.
_choices: dict[tuple[str, ...], str | None] = {}

# Rows, narrow type -> per entry of rows (seconds in the narrow type, seconds in float32).
Race = Callable[[Sequence[int], str], Sequence[tuple[float, float]]]


def computes_in(narrow: str) -> bool:
    """Whether this processor may compute in `narrow`: not an x86 one that lists no such feature.
    One that lists them may still be slow in it (a virtual machine may hide AMX)."""
    import torch

    features = torch.cpu.get_capabilities()
    return features["architecture"] != "x86_64" or any(map(features.get, NARROW[narrow]))


def weights_dtype(
    options: Mapping[str, Any],
    free_memory: int,
    race: Race,
    computes: Callable[[str], bool] = computes_in,
) -> str | None:
    """The value of vLLM's `dtype` for its engine arguments `options`; None leaves it to vLLM.

    It is left to vLLM where the operator named a type, where the weights are quantised (their
    kernels have types of their own), where the checkpoint is not on this machine yet, and where
    float32 weights would take more than half of `free_memory` (bytes). It is float32 where the
    processor does not compute in the other type, as `computes` says; else `race` measures products.
    """
    folder = _folder(options["model"], options.get("revision"))
    if options["dtype"] != "auto" or options.get("quantization") is not None or folder is None:
        return None
    config = _read(folder / "config.json")
    text = {**config, **(config.get("text_config") or {})}
    stored = text.get("dtype") or text.get("torch_dtype")
    if "quantization_config" in config or stored not in (*NARROW, "float32"):
        return None
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    in_float32 = size if stored == "float32" else 2 * size
    if not size or in_float32 > FLOAT32_SHARE * free_memory:
        return None
    narrow = stored if stored in NARROW else "bfloat16"
    if not computes(narrow):
        logger.info("weights in float32: this processor does not compute in %s", narrow)
        return "float32"
    times = race(ROWS, narrow)
    # Not their sum: a number of rows whose products all waited for a core would decide alone.
    chosen = narrow if median(narrowed / full for narrowed, full in times) < 1.0 else "float32"
    logger.info(
        "weights in %s: products of %s rows take %s us in %s, %s us in float32",
        chosen,
        "/".join(map(str, ROWS)),
        "/".join(f"{1e6 * pair[0]:.0f}" for pair in times),
        narrow,
        "/".join(f"{1e6 * pair[1]:.0f}" for pair in times),
    )
    return chosen


def lasting_weights_dtype(options: Mapping[str, Any], free_memory: int, race: Race) -> str | None:
    """The `weights_dtype` of this process: its first choice for these options, kept from then on.

    An engine that is started again must have the type with which its step times were measured.
    By then other load may slow the race down, and there may be more or less free memory.
    """
    key = tuple(str(options.get(name)) for name in ("model", "revision", "dtype", "quantization"))
    if key not in _choices:
        _choices[key] = weights_dtype(options, free_memory, race)
    return _choices[key]


def _folder(model: str, revision: str | None) -> Path | None:
    """The checkpoint's folder: `model` itself, or a snapshot of it in the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _read(file: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def measure(
    rows: Sequence[int], narrow: str, threads: int | None = None
) -> Sequence[tuple[float, float]]:
    """A `Race` on this machine, in half a second: 64 MiB of float32 weights, more than L2 holds.

    `threads` is how many the model has; None for torch's default.
    """
    import torch

    from drafters.vllm.cpu_matmul import race

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        kind = getattr(torch, narrow)
        return race(rows, narrow=kind, inputs=1024, outputs=2048, copies=8, rounds=3)
    finally:
        torch.set_num_threads(before)
