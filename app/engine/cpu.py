"""What the engine finds on a CPU machine: memory, a compiler, libraries to load first."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

TCMALLOC = "usr/lib/*/libtcmalloc_minimal.so.4"


@dataclass(frozen=True)
class CpuMachine:
    """Facts that decide how the engine is started on a CPU."""

    free_memory: int  # bytes
    can_compile: bool


def cpu_machine() -> CpuMachine:
    """This machine."""
    return CpuMachine(
        free_memory=psutil.virtual_memory().available,
        can_compile=compiler() is not None and has_python_headers(),
    )


def compiler() -> str | None:
    """The C++ compiler that torch would use (torch/_inductor/cpp_builder.py), or None."""
    return shutil.which(os.environ.get("CXX") or "g++")


def has_python_headers() -> bool:
    """Compiled models are Python extensions."""
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the engine's processes are started with, beside `environ`.

    torch puts large tensors on huge pages if asked to (c10/core/impl/alloc_cpu.cpp); what is
    not torch's memory follows when the weights are loaded (drafters/vllm/pages.py).
    """
    huge = environ.get("THP_MEM_ALLOC_ENABLE", "1")
    return {"LD_PRELOAD": preload(environ), "THP_MEM_ALLOC_ENABLE": huge}


def preload(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """LD_PRELOAD for the engine's processes: what is set already, and tcmalloc if installed.

    Processes read it when they start, so it is enough to set it before the engine starts
    its own. What it gains, and why Intel's OpenMP is not among it: docs/decisions/0002-preload.md.
    """
    given = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    if not any("tcmalloc" in library for library in given):
        given += [str(path) for path in sorted(root.glob(TCMALLOC))[:1]]
    return ":".join(given)
