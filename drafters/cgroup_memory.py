"""Memory that this process's control groups still allow, for containers with a memory limit.

psutil and /proc/meminfo speak of the host. A container's limit is in its cgroup, of version 2 (one
hierarchy) or 1 (one for memory), and those above it count too: a pod's limit lies above its
container's. Standard library only.
"""

from __future__ import annotations

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


def headroom(root: Path = Path("/")) -> int | None:
    """Bytes that may still be allocated before a limit of a cgroup is reached; None without a
    limit. `root` has this process's `proc` and `sys`.

    Inactive page cache counts as free, as it does to Kubernetes: the kernel drops it for an
    allocation. A model that was just downloaded would otherwise leave nothing.
    """
    remaining = []
    for folder, files in _groups(root):
        limit, usage = _number(folder / files.limit), _number(folder / files.usage)
        if limit is not None and limit < UNLIMITED and usage is not None:
            remaining.append(limit - max(0, usage - _page_cache(folder, files)))
    return max(0, min(remaining)) if remaining else None


def inactive_page_cache(root: Path = Path("/")) -> int:
    """Bytes of inactive page cache in the cgroup at the top of what this container sees, where vLLM
    reads limit and usage."""
    for folder, _, files in _mounts(root):
        if (folder / files.usage).exists():
            return _page_cache(folder, files)
    return 0


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's memory cgroups, each with those above it."""
    for mount, own, files in _mounts(root):
        folder = mount / own
        yield mount, files
        for parent in (folder, *folder.parents):
            if parent == mount:
                break
            if parent.is_dir():
                yield parent, files


def _mounts(root: Path) -> Iterator[tuple[Path, PurePosixPath, _Files]]:
    """(where a hierarchy with memory is mounted, this process's cgroup below that, its files)."""
    try:
        # Paths are bytes: one of them need not be UTF-8.
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
        groups = (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    paths = {}
    for line in groups:  # number:controllers:path, for version 2 without a controller
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    for line in mounts:
        place, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        mounted, point = place.split(" ")[3:5]
        yield root / point.lstrip("/"), _below(paths[kind], mounted), _FILES[kind]


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
