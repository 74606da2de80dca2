"""Huge pages for an engine on a CPU. Each step reads all weights, which with pages of 4 KiB means a
TLB miss for each page (docs/decisions/0013)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from time import perf_counter

HUGE = 2 << 20  # bytes, on x86-64 and on Arm with 4 KiB pages
MADV_COLLAPSE = 25  # Linux 6.1; whatever /sys/kernel/mm/transparent_hugepage says
BUDGET_S = 20.0  # enough for about 8 GiB


def collapse(budget_s: float = BUDGET_S) -> int:
    """Move the memory that this process has written to onto huge pages; stops after `budget_s`
    seconds. Returns the bytes that are on them now: 0 if the kernel has no MADV_COLLAPSE."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    end, done = perf_counter() + budget_s, 0
    for begin, behind in list(_writable()):
        for page in range(begin, behind, HUGE):
            # Refused for pages that were never written to, among other reasons.
            done += HUGE if madvise(page, HUGE, MADV_COLLAPSE) == 0 else 0
            if perf_counter() > end:
                return done
    return done


def _writable() -> Iterator[tuple[int, int]]:
    """Start and end of this process's anonymous memory, in bytes, at multiples of HUGE."""
    if not os.path.exists("/proc/self/maps"):
        return
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            name = fields[5] if len(fields) > 5 else ""
            if not fields[1].startswith("rw") or name not in ("", "[heap]"):
                continue
            begin, behind = (int(address, 16) for address in fields[0].split("-"))
            yield -(-begin // HUGE) * HUGE, behind // HUGE * HUGE
