"""The processor of this machine, and the memory and cores that this process's control groups allow.

psutil, /proc/meminfo and the affinity of a process speak of the host. A container's or a service's
limits are in its cgroup, of version 2 (one hierarchy) or 1 (one for each kind), and those above it
count too: a pod's limit lies above its container's. Standard library only.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

UNLIMITED = 1 << 62  # from here on version 1 means that there is no limit


class _Files(NamedTuple):
    """File names of one cgroup version."""

    limit: str
    usage: str
    inactive: str  # a line of memory.stat, of the whole subtree


_FILES = {
    "cgroup2": _Files("memory.max", "memory.current", "inactive_file"),
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name, such as "AMD EPYC 9B45"; empty where nothing tells it."""
    try:
        lines = (root / "proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def core_limit(root: Path = Path("/")) -> float | None:
    """How many cores' time the cgroups of this process may use; None without a limit. `root` has
    this process's `proc` and `sys`."""
    limits = []
    for folder, kind in _groups(root, "cpu"):
        try:
            if kind == "cgroup2":  # quota and period, in microseconds
                quota, period = (folder / "cpu.max").read_text("utf-8").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text("utf-8")
                period = (folder / "cpu.cfs_period_us").read_text("utf-8")
            if quota != "max" and int(quota) > 0:  # version 1 writes -1 for none
                limits.append(int(quota) / int(period))
        except (OSError, ValueError):  # the root has no such file
            continue
    return min(limits, default=None)


def headroom(root: Path = Path("/")) -> int | None:
    """Bytes that may still be allocated before a limit of a cgroup is reached; None without a
    limit. `root` has this process's `proc` and `sys`.

    Inactive page cache counts as free, as it does to Kubernetes: the kernel drops it for an
    allocation. A model that was just downloaded would otherwise leave nothing.
    """
    remaining = []
    for folder, kind in _groups(root, "memory"):
        files = _FILES[kind]
        limit, usage = _number(folder / files.limit), _number(folder / files.usage)
        if limit is not None and limit < UNLIMITED and usage is not None:
            remaining.append(limit - max(0, usage - _page_cache(folder, files)))
    return max(0, min(remaining)) if remaining else None


def inactive_page_cache(root: Path = Path("/")) -> int:
    """Bytes of inactive page cache in the cgroup at the top of what this container sees, where vLLM
    reads limit and usage."""
    for folder, _, kind in _mounts(root, "memory"):
        files = _FILES[kind]
        if (folder / files.usage).exists():
            return _page_cache(folder, files)
    return 0


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """The folders of this process's cgroups with a controller, each with those above it, and the
    kind of file system that they are in: `cgroup2`, or `cgroup` for version 1."""
    for mount, own, kind in _mounts(root, controller):
        folder = mount / own
        yield mount, kind
        for parent in (folder, *folder.parents):
            if parent == mount:
                break
            if parent.is_dir():
                yield parent, kind


def _mounts(root: Path, controller: str) -> Iterator[tuple[Path, PurePosixPath, str]]:
    """(where a hierarchy with the controller is mounted, this process's cgroup below that, its
    kind)."""
    try:
        # Paths are bytes: one of them need not be UTF-8.
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
        groups = (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    paths = {}
    for line in groups:  # number:controllers:path, for version 2 without a controller
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    for line in mounts:
        place, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        mounted, point = place.split(" ")[3:5]
        yield root / point.lstrip("/"), _below(paths[kind], mounted), kind


def _below(path: str, mounted: str) -> PurePosixPath:
    """A cgroup's path below the one that is mounted; the mounted one itself if it lies elsewhere,
    as in a container that sees its own cgroup alone."""
    own = PurePosixPath(path)
    if ".." in own.parts or not own.is_relative_to(mounted):
        return PurePosixPath()
    return own.relative_to(mounted)


def _page_cache(folder: Path, files: _Files) -> int:
    try:
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(fields.get(files.inactive, 0))


def _number(file: Path) -> int | None:
    """A file's number; None for "max", and where there is no such file."""
    try:
        return int(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
