"""Make an archive of vLLM's CUDA build and the packages that it needs beside torch.

    python -m deploy.offline.archive --sm 90 --out vllm-sm90.tar.xz

It is for a GPU machine without a network that has Python 3.12, torch with CUDA, triton and
transformers (docs/gpu-check.md). Versions and hashes are those of requirements/*.lock. vLLM's
device code is pruned to one architecture, and what no check runs is left out. Needs pip and 3 GB of
disk; compressing takes minutes.
"""

from __future__ import annotations

import argparse
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deploy.offline.fatbin import prune

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = ("cuda", "dev")
WHEELS = Path(__file__).parent / "wheels.txt"
PYTHON = "3.12"
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (*range(39, 11, -1), 5)),
    *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")),
]
# vLLM's extensions with device code that a dense model or a mixture of experts in bfloat16 runs.
EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
# FlashAttention 3 is for Hopper alone. FlashAttention 2 holds PTX for others and is four times too
# large to travel: there Triton's attention runs.
ATTENTION = {90: ("vllm_flash_attn/_vllm_fa3_C",)}
HOST_EXTENSIONS = ("cumem_allocator", "spinloop", "fs_io_C")
_KEPT = re.compile(r".*\.(py|json|jinja2?|typed)")
_UNUSED = ("third_party/deep_gemm/", "third_party/fmha_sm100/")
_DICTIONARY = 128 << 20  # bytes; device code of different kernels is alike


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the archive; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="aerie-archive-") as folder:
            site = Path(folder) / "site"
            install(requirements(names()), Path(folder) / "requirements.txt", site)
            strip(site, options.sm)
            compress(site, options.out)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"archive: {error}", file=sys.stderr)
        return 1
    print(f"archive: {options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")
    return 0


def names() -> list[str]:
    """Names of the packages in the archive, vLLM first."""
    lines = WHEELS.read_text("utf-8").splitlines()
    return ["vllm", *(line for line in lines if line and not line.startswith("#"))]


def requirements(packages: Iterable[str]) -> str:
    """Pins with hashes of `packages`, from the locks. Raises ValueError for one that none has."""
    pins: dict[str, str] = {}
    for lock in LOCKS:
        text = (REPOSITORY / "requirements" / f"{lock}.lock").read_text("utf-8")
        for pin in re.findall(r"^[a-z0-9].*(?:\n .*)*", text, re.MULTILINE):
            name = re.split(r"[=\[ ]", pin, maxsplit=1)[0]
            if _applies(pin):
                pins.setdefault(name, pin)
    if missing := [name for name in packages if name not in pins]:
        raise ValueError(f"no lock has {', '.join(missing)}")
    return "\n".join(pins[name] for name in packages) + "\n"


def _applies(pin: str) -> bool:
    """Whether a pin holds for the archive's Python: locks name a version for each that differs."""
    marker = re.search(r"python_version *(==|<|>=) *['\"]([\d.]+)['\"]", pin)
    if marker is None:
        return True
    ours, theirs = (tuple(map(int, text.split("."))) for text in (PYTHON, marker[2]))
    return {"==": ours == theirs, "<": ours < theirs, ">=": ours >= theirs}[marker[1]]


def install(pins: str, file: Path, site: Path) -> None:
    """Install pins into `site`, for the other machine's Python. Raises CalledProcessError."""
    file.write_text(pins, "utf-8")
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    line += ["--no-deps", "--no-compile", "--only-binary=:all:", "--require-hashes"]
    line += ["--python-version", PYTHON, "--implementation", "cp"]
    line += [part for abi in ("cp312", "abi3", "none") for part in ("--abi", abi)]
    line += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*line, "--target", str(site), "-r", str(file)], check=True)


def strip(site: Path, architecture: int) -> None:
    """Remove from `site` what of vLLM no check runs, and prune device code to `architecture`."""
    vllm = site / "vllm"
    pruned = {f"{name}.abi3.so" for name in (*EXTENSIONS, *ATTENTION.get(architecture, ()))}
    whole = {f"{name}.abi3.so" for name in HOST_EXTENSIONS}
    for file in [file for file in vllm.rglob("*") if file.is_file()]:
        name = file.relative_to(vllm).as_posix()
        if name in pruned:
            library, before, after = prune(file.read_bytes(), architecture)
            file.write_bytes(library)
            print(f"archive: {name}: device code {before / 1e6:.1f} -> {after / 1e6:.1f} MB")
        elif name not in whole and (name.startswith(_UNUSED) or not _KEPT.fullmatch(name)):
            file.unlink()
    if missing := sorted(name for name in pruned if not (vllm / name).exists()):
        raise ValueError(f"this vLLM has no {', '.join(missing)}")


def compress(site: Path, out: Path) -> None:
    """Write the files of `site` to a .tar.xz, in an order and with metadata that never differ."""
    out.parent.mkdir(parents=True, exist_ok=True)
    filters = [
        {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": _DICTIONARY}
    ]
    with (
        lzma.open(out, "wb", filters=filters) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for file in _files(site):
            tar.add(file, file.relative_to(site).as_posix(), filter=_plain)


def _files(site: Path) -> Iterator[Path]:
    """Files by ending, then by name: like code beside like code compresses better."""
    found = (file for file in site.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return iter(sorted(found, key=lambda file: (file.suffix, file.as_posix())))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.offline.archive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sm", type=int, default=90, metavar="N",
                        help="architecture of the GPU: 90 is Hopper, 100 a B200 [90]")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the archive")
    return parser


if __name__ == "__main__":
    sys.exit(main())
