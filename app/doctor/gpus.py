"""NVIDIA GPUs as their driver reports them, and which of them CUDA shows to a process. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
FIELDS = (
    *("index", "uuid", "name", "memory.total", "memory.free"),
    *("mig.mode.current", "driver_version"),
)
CAPABILITY = "compute_cap"  # a field that old drivers do not know
_VERSION = re.compile(r"\d+\.\d+")


class GpuDevice(NamedTuple):
    """Facts about one GPU, or about a MIG slice of one."""

    number: str  # in the order of the bus
    uuid: str
    name: str
    gib: float | None  # None: of a slice, or of a GPU that shares the host's memory
    driver: str
    capability: float | None = None  # CUDA's compute capability
    free_gib: float | None = None  # None where `gib` is


def query(*, capability: bool = True) -> tuple[str, ...]:
    """The command that lists the GPUs; `capability`: with the field CAPABILITY."""
    fields = (*FIELDS, CAPABILITY) if capability else FIELDS
    return ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def read(text: str, *, capability: bool = True) -> list[GpuDevice]:
    """The GPUs in the answer to `query`, a line each."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if not capability:
            fields.append("")
        if len(fields) <= len(FIELDS):
            continue
        # A name may have commas.
        number, uuid, *name, total, free, mig, driver, supported = fields
        version = float(supported) if _VERSION.fullmatch(supported) else None
        gib = free_gib = None
        if total.isdigit() and free.isdigit() and mig != "Enabled":
            gib, free_gib = int(total) / 1024, int(free) / 1024
        gpus.append(GpuDevice(number, uuid, ", ".join(name), gib, driver, version, free_gib))
    return gpus


def visible(gpus: Sequence[GpuDevice], environ: Mapping[str, str]) -> list[GpuDevice]:
    """Those of `gpus` that CUDA shows, in its order: all without CUDA_VISIBLE_DEVICES, else those
    that it names up to the first unknown one, and none if it names one twice.

    An index is taken for the driver's, which may be another GPU than CUDA's: see `is_certain`.
    """
    listed = environ.get(VISIBLE)
    if listed is None:
        return list(gpus)
    visible_gpus: list[GpuDevice] = []
    for entry in listed.split(","):
        gpu = _named(entry.strip(), gpus)
        if gpu is None:
            break
        if gpu in visible_gpus:
            return []
        visible_gpus.append(gpu)
    return visible_gpus


def _named(entry: str, gpus: Sequence[GpuDevice]) -> GpuDevice | None:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES means: an index, a UUID or its beginning."""
    if entry.startswith("MIG-"):  # the driver's list has whole GPUs alone
        if not gpus:
            return None
        return GpuDevice("", entry, "MIG slice", None, gpus[0].driver, gpus[0].capability)
    if entry.startswith("GPU-"):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    return next((gpu for gpu in gpus if gpu.number == entry), None)


def is_certain(gpus: Sequence[GpuDevice], environ: Mapping[str, str]) -> bool:
    """Whether `visible` gives the GPUs that an engine gets, in its order. `gpus` are all those of
    the machine.

    That is so if all are equal, if CUDA_VISIBLE_DEVICES names them by UUID, and if it names them by
    index while CUDA_DEVICE_ORDER is PCI_BUS_ID. Otherwise CUDA numbers unequal GPUs from the
    fastest on, and the driver by their place on the bus.
    """
    listed = environ.get(VISIBLE)
    if len({(gpu.name, gpu.gib) for gpu in gpus}) <= 1:
        return True
    if listed is None:
        return False
    by_index = any(entry.strip().isdigit() for entry in listed.split(","))
    return not by_index or environ.get(ORDER) == "PCI_BUS_ID"


def memory(gpus: Sequence[GpuDevice]) -> list[float]:
    """GiB of each GPU, in their order; nothing if that of any is unknown."""
    sizes = [gpu.gib for gpu in gpus if gpu.gib is not None]
    return sizes if len(sizes) == len(gpus) else []


def description(gpus: Sequence[GpuDevice]) -> str | None:
    """The names of GPUs, as "2 x NVIDIA H200"; None without any."""
    counts = Counter(gpu.name for gpu in gpus)
    names = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    return " and ".join(names) or None
