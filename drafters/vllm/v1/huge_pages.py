"""Huge pages under an engine on a CPU: it reads all of its weights in every step, and 4 KiB at a
time that is a miss of the TLB for each page of them (docs/decisions/0013)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from time import perf_counter

HUGE = 2 << 20  # bytes, on x86-64 and on Arm with 4 KiB pages
MADV_COLLAPSE = 25  # Linux 6.1; whatever /sys/kernel/mm/transparent_hugepage says
BUDGET_S = 20.0  # some 8 GiB


def collapse(budget_s: float = BUDGET_S) -> int:
    """Put what this process has written to so far on huge pages. Bytes that are on them now; 0
    where the kernel knows no such request. Stops after `budget_s` seconds."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    end, done = perf_counter() + budget_s, 0
    for begin, behind in list(_writable()):
        for page in range(begin, behind, HUGE):
            # Refused for pages that nothing was written to, among other reasons.
            done += HUGE if madvise(page, HUGE, MADV_COLLAPSE) == 0 else 0
            if perf_counter() > end:
                return done
    return done


def _writable() -> Iterator[tuple[int, int]]:
    """This process's own memory, from and to multiples of a huge page."""
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
