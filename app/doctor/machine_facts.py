"""Facts about this machine, which its checks take as arguments (app/doctor/machine.py)."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from app.doctor import gpus
from app.doctor.machine import GIB


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def import_error(name: str) -> str | None:
    """What importing a module raises; None if it is imported."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken native library raises anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def gpu_devices() -> list[gpus.GpuDevice]:
    """Every GPU of the machine, asked from its driver so that torch need not be loaded."""
    for capability in (True, False):
        query = gpus.query(capability=capability)
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        except subprocess.CalledProcessError:
            continue  # an old driver, or a broken one
        except (OSError, subprocess.SubprocessError):
            break
        return gpus.read(done.stdout, capability=capability)
    return []


def cpu_flags() -> set[str]:
    """The features of the CPU, by the names that Linux gives them."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return set()
    found = next((line for line in lines if line.startswith("flags")), "")
    return set(found.partition(":")[2].split())


def compile_cache() -> Path:
    """Where vLLM keeps compiled graphs (vllm/envs.py, VLLM_CACHE_ROOT)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("VLLM_CACHE_ROOT") or f"{base}/vllm").expanduser()


def free_disk(folder: Path) -> tuple[float, str]:
    """GiB that are free where `folder` is or would be, and the nearest folder that exists."""
    # os.path.exists() also answers for what lies in a folder that this user may not read.
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    return shutil.disk_usage(nearest).free / GIB, str(nearest)


def write_error(folder: Path) -> str | None:
    """What keeps this user from writing into a folder, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def listen_error(host: str, port: int) -> str | None:
    """What keeps a server from listening at an address and port; None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()  # as service listens (app/server/run.py)
    try:
        with socket.create_server((host, port), family=family, dualstack_ipv6=both):
            return None
    except OSError as error:
        return error.strerror or str(error)
