"""Process-wide settings that make training on a CPU fast."""

from __future__ import annotations

import ctypes
import os
import platform
from time import perf_counter

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt's parameter numbers in glibc
_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192"  # default 1,024; some 2,000 shapes occur
# Rows of the square matrices by which types are compared, and trials. A processor that only
# emulates bfloat16 takes seconds for the large ones, and is told by the small ones.
_SIDES, _TRIALS = (256, 768), 5
_CLEARLY = 4.0  # times as fast: no larger product is needed


def prepare_cpu(threads: int | None = None) -> None:
    """Keep freed memory in the process, and set the number of threads.

    glibc maps new pages for each large tensor and unmaps them on free; a step allocates gigabytes.
    If pages are kept, the logits of 8,192 tokens take 52 ms instead of 117 (bf16, one core).
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    os.environ.setdefault(*_PRIMITIVES)  # read at the first product
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def return_memory() -> None:
    """Return unused memory that `prepare_cpu` keeps: batches of ever new shapes fragment it."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def slow_bfloat16(device: str) -> torch.dtype | None:
    """float32 on a CPU that multiplies it faster than bfloat16, else None.

    Measured in 0.2 s, because the features that a processor lists do not tell: with `avx512_bf16`
    but no AMX, bfloat16 is half as fast as float32 (bench/LOG.md, 2026-11-23).
    """
    if device != "cpu":
        return None
    ratio = 1.0
    for side in _SIDES:
        # In turns, so that whatever else runs on this machine slows down both.
        types = (torch.bfloat16, torch.float32)
        took = [[seconds_of(dtype, side) for dtype in types] for _ in range(_TRIALS)]
        in_half, in_full = map(min, zip(*took, strict=True))
        ratio = in_half / in_full
        if not 1 / _CLEARLY < ratio < _CLEARLY:
            break
    return torch.float32 if ratio > 1.0 else None


def seconds_of(dtype: torch.dtype, side: int) -> float:
    """Seconds that the product of two square matrices of `side` rows takes."""
    matrix = torch.ones(side, side, dtype=dtype)
    began = perf_counter()
    matrix @ matrix
    return perf_counter() - began
