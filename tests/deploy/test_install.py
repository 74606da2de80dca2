"""Locks and installation: every file by its hash, and nothing that is not needed."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.engine.configuration.options import TORCHVISION_FOR_A_CPU
from app.settings import REPOSITORY

FOLDER = REPOSITORY / "requirements"
LOCKS = ("cpu", "cuda", "dev", "models")
SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", FOLDER / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


lock = _load()


def pins(name: str) -> list[tuple[Requirement, tuple[str, ...]]]:
    text = (FOLDER / f"{name}.lock").read_text("utf-8")
    return [(Requirement(pin.requirement), pin.hashes) for pin in lock.read(text)]


def versions(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for requirement, _ in pins(name):
        found.setdefault(requirement.name, set()).add(str(requirement.specifier))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_by_version_and_hash(name: str) -> None:
    assert pins(name)
    for requirement, hashes in pins(name):
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(SHA256.fullmatch(each) for each in hashes), requirement


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_tools_change_no_version_of_what_is_served(backend: str) -> None:
    served = versions(backend)
    changed = {
        name: (found, served[name])
        for name, found in versions("dev").items()
        if name in served and not found <= served[name]
    }
    assert not changed


def test_a_cpu_gets_no_packages_for_gpus() -> None:
    assert not [name for name in versions("cpu") if re.match(r"triton|nvidia-|cuda-", name)]


def test_a_gpu_gets_what_targets_that_read_images_are_imported_with() -> None:
    """The fault: Gemma 4 and Qwen3.5 did not start on a GPU, for text alone either."""
    found = versions("cuda")
    assert found["torch"] == {"==2.13.0"}, "choose the torchvision that is made for that torch"
    assert found["torchvision"] == {"==0.28.0"}
    assert TORCHVISION_FOR_A_CPU.endswith(" torchvision==0.28.0")


def test_kernels_are_tested_with_the_triton_that_is_served() -> None:
    assert versions("dev")["triton"] == versions("cuda")["triton"]


def test_a_lock_is_read_as_it_is_written() -> None:
    """The form that pip reads, too: a hash a line, each line but the last continued."""
    for name in ("cpu", "cuda", "dev"):
        text = (FOLDER / f"{name}.lock").read_text("utf-8")
        body = "".join(line for line in text.splitlines(True) if line[0] != "#")
        assert "".join(f"{pin}\n" for pin in lock.read(text)) == body


def test_hashes_stay_with_their_version() -> None:
    """Of a build that this run's index does not have, the lock keeps the hash; not of another's."""
    earlier = list(lock.read("a==1 --hash=sha256:old\nb==1 --hash=sha256:other\n"))
    resolved = (
        "a==1 ; sys_platform == 'linux' \\\n    --hash=sha256:new\n"
        "b==2 \\\n    --hash=sha256:new\n"
        "c==1 ; sys_platform == 'win32' \\\n    --hash=sha256:new\n"
        "d==1 \\\n    --hash=sha256:new\n"
    )
    found = lock.simplify(resolved, ["d"], earlier)
    assert [(pin.requirement, pin.hashes) for pin in found] == [
        ("a==1", ("sha256:new", "sha256:old")),
        ("b==2", ("sha256:new",)),
    ]


def test_tools_keep_to_what_either_build_has() -> None:
    cpu = list(lock.read("same==1 --hash=x\ndiffers==1+cpu --hash=x\nalone==3 --hash=x\n"))
    cuda = list(lock.read("same==1 --hash=x\ndiffers==1 --hash=x\ntriton==2 --hash=x\n"))
    kept, either = lock.beside(cpu, cuda)
    assert sorted(kept) == ["alone==3", "differs==1", "same==1", "triton==2"]
    assert either == {"same==1"}


# Stands for Python, pip and uv: writes down how it is called, and makes what comes of it.
STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0") $*" | tr '\\n' ' ' >>"$CALLS"; echo >>"$CALLS"
case "$*" in
    *" venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *importlib.metadata*) exit 1 ;;
    *--target*) mkdir -p "$9/bin" && cp "$0" "$9/bin/uv" ;;
    *pip*torch.txt*) [ "$(basename "$0")" = uv ] || exit "${TORCH_STATUS:-0}" ;;
esac
"""


def installs(folder: Path, *modes: str, **environ: str) -> list[str]:
    """What requirements/install.sh has pip and uv install, one line a command."""
    (folder / "requirements").mkdir()
    for file in FOLDER.iterdir():
        if file.is_file():
            (folder / "requirements" / file.name).write_bytes(file.read_bytes())
            (folder / "requirements" / file.name).chmod(0o755)
    python = folder / "python3"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    calls = folder / "calls"
    for mode in modes:
        done = subprocess.run(
            ["requirements/install.sh", mode], cwd=folder, capture_output=True, text=True,
            env={**os.environ, "PYTHON": str(python), "CALLS": str(calls), **environ}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert (folder / ".venv" / f".installed-{mode}").exists()
    return [line for line in calls.read_text().splitlines() if "pip install" in line]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_all_that_is_fetched_has_a_hash(tmp_path: Path, backend: str) -> None:
    commands = installs(tmp_path, backend)
    assert "--no-build-isolation --editable ." in commands[-1]
    assert f"requirements/{backend}.lock" in "".join(commands)
    for command in commands[:-1]:
        assert "--require-hashes" in command
        assert "--no-deps" in command
    assert "dev.lock" not in "".join(commands), "tools are installed on request"


def test_tools_come_on_top(tmp_path: Path) -> None:
    commands = installs(tmp_path, "cpu", "tools")
    assert "--require-hashes -r requirements/dev.lock" in commands[-1]


def test_uv_takes_torch_by_hash_where_pip_has_none(tmp_path: Path) -> None:
    commands = installs(tmp_path, "cpu", TORCH_STATUS="1")
    by_pip, uv, by_uv = commands[:3]
    assert "torch.txt" in by_pip
    assert "uv.txt" in uv
    assert "--target" in uv, "not into the environment that serves"
    assert by_uv.startswith("uv ")
    assert all("--require-hashes" in command for command in commands[:3])


def test_one_package_of_a_lock_is_taken_with_its_hashes() -> None:
    script = (FOLDER / "install.sh").read_text("utf-8")
    [function] = re.findall(r"^pin_of\(\) \{.*?^\}", script, re.MULTILINE | re.DOTALL)
    text = subprocess.check_output(
        ["bash", "-c", f"{function}\npin_of torch {FOLDER / 'cpu.lock'}"], text=True
    )
    [torch] = lock.read(text)
    [wanted] = [hashes for requirement, hashes in pins("cpu") if requirement.name == "torch"]
    assert torch.hashes == wanted


def test_nothing_is_imported_that_is_not_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    declared = {canonicalize_name(Requirement(each).name) for each in listed}
    providers = packages_distributions()
    undeclared = {}
    for root in ("app", "bench", "drafters"):
        for file in (REPOSITORY / root).rglob("*.py"):
            for module in _imported(ast.parse(file.read_text("utf-8"))):
                names = {canonicalize_name(each) for each in providers.get(module, ())}
                if names and not names & declared:
                    undeclared[module] = str(file.relative_to(REPOSITORY))
    assert not undeclared


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    ours = {"app", "bench", "deploy", "drafters", "tests"}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - ours
