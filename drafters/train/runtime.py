"""Process-wide settings that make training on a CPU fast."""

from __future__ import annotations

import ctypes
import os
import platform
from time import perf_counter

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt's parameter numbers in glibc
_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192"  # some 2,000 shapes occur; its own is 1,024
_SIDE, _TRIALS = 768, 5  # of the product by which types are compared


def prepare_cpu(threads: int | None = None) -> None:
    """Keep freed memory in the process, and set the number of threads.

    glibc gives each large tensor fresh pages and returns them on free; a step allocates
    gigabytes. Keeping the pages, 8,192 tokens' logits take 52 ms instead of 117 (bf16, one core).
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    os.environ.setdefault(*_PRIMITIVES)  # read at the first product
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def return_memory() -> None:
    """Give back what `prepare_cpu` keeps: batches of ever new shapes leave holes behind."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def slow_bfloat16(device: str) -> torch.dtype | None:
    """float32 for a CPU that multiplies it faster than bfloat16; None where nothing speaks for it.

    By trying, in 0.1 s. What a processor lists is no answer: `avx512_bf16` without AMX is half as
    fast as float32 (bench/LOG.md, 2026-11-23).
    """
    if device != "cpu":
        return None
    # In turns, and the fastest of each: whatever else runs here slows down both.
    took = [(seconds_of(torch.bfloat16), seconds_of(torch.float32)) for _ in range(_TRIALS)]
    in_half, in_full = map(min, zip(*took, strict=True))
    return torch.float32 if in_full < in_half else None


def seconds_of(dtype: torch.dtype) -> float:
    """Seconds that the product of two square matrices takes."""
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype)
    began = perf_counter()
    matrix @ matrix
    return perf_counter() - began
