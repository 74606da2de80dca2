"""What travels to a machine without a network: the lean tree runs by itself, and the archive has
every package with the hashes of the locks and device code for one architecture."""

from __future__ import annotations

import ast
import os
import re
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.gpu_check.parts import PARTS
from deploy.offline import lean_tree
from deploy.offline.archive import compress, names, requirements, strip
from deploy.offline.fatbin import CONTAINER_MAGIC, ELF_IMAGE, prune

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_BYTES = 8 << 20  # of the tree before compression: the archive needs the rest of 64 MiB
PTX = 1


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lean tree of this checkout's files, unpacked."""
    folder = tmp_path_factory.mktemp("tree")
    paths = lean_tree.travelling(lean_tree.files())
    size = lean_tree.pack(paths, "1234567-dirty", folder / "tree.tar.xz")
    assert 1 << 20 < size < MOST_BYTES
    with tarfile.open(folder / "tree.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder / lean_tree.ROOT


def test_the_tree_has_no_weights_and_all_that_is_imported(tree: Path) -> None:
    files = {file.relative_to(tree).as_posix() for file in tree.rglob("*") if file.is_file()}
    assert not [name for name in files if name.endswith((".safetensors", ".png"))]
    assert not [name for name in files if name.startswith(("bench/results/", "docs/images/"))]
    assert {"Makefile", "pyproject.toml", "models/embedded/target/tokenizer.json"} <= files
    assert {"models/embedded/p-eagle/config.json", "tests/drafters/ops/kernels.py"} <= files
    for folder in ("app", "bench", "drafters", "tests/drafters"):
        sources = {
            f.relative_to(REPOSITORY).as_posix() for f in (REPOSITORY / folder).rglob("*.py")
        }
        assert sources - files == set()


def python(tree: Path, *arguments: str) -> str:
    """What Python prints that finds this project in the tree alone."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tree_runs_by_itself(tree: Path) -> None:
    assert "usage: aerie bench gpu-check" in python(tree, "-m", "bench.gpu_check", "--help")
    modules = {"bench.gpu_check.part", "bench.cli", "app.cli"}
    modules |= {f"bench.gpu_check.{part.body.partition(':')[0]}" for part in PARTS}
    code = f"import sys, {', '.join(sorted(modules))}\n"
    code += "from bench.provenance import commit\nfrom bench.systems.model_free import write\n"
    code += "from pathlib import Path\nwrite('toy', Path('models-of-the-check'))\n"
    code += "print(commit(), sys.modules['bench.gpu_check.part'].__file__)"
    assert python(tree, "-c", code).split() == [
        "1234567-dirty", str(tree / "bench" / "gpu_check" / "part.py"),
    ]  # fmt: skip


def test_the_tree_can_serve(tree: Path) -> None:
    """Catches: a picture of the page that was left out, without which no gateway starts."""
    code = "from app.page.files import router; router()"
    python(tree, "-c", code)


def test_only_the_standard_library_is_needed_to_unpack_the_archive() -> None:
    """The archive brings psutil and the like: what unpacks it cannot import them."""
    code = "import sys, bench.gpu_check.check\n"
    code += "print({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names))"
    line = [sys.executable, "-S", "-c", code]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = {name for name in ast.literal_eval(done.stdout) if not name.startswith("__")}
    assert found == {"app", "bench", "drafters"}


def test_every_package_of_the_archive_is_pinned_with_its_hashes() -> None:
    pins = requirements(names()).splitlines()
    pinned = [re.split("==", line)[0] for line in pins if not line.startswith(" ")]
    assert pinned == names()
    assert pinned[0] == "vllm" and {"hypothesis", "psutil", "aiohttp"} <= set(pinned)
    assert sum("--hash=sha256:" in line for line in pins) >= len(pinned)
    with pytest.raises(ValueError, match="no-such-package"):
        requirements(["vllm", "no-such-package"])


def test_packages_that_a_gpu_machine_has_do_not_travel() -> None:
    there = {"torch", "triton", "transformers", "numpy", "safetensors", "httpx", "pytest"}
    assert not there & set(names())


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """Device code of a container: a header of 64 bytes, then the image."""
    header = struct.pack("<HHIQ", kind, 1, 64, len(code)).ljust(28, b"\1")
    return (header + struct.pack("<I", architecture)).ljust(64, b"\2") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", CONTAINER_MAGIC, 1, 16, len(body)) + body


def library(section: bytes) -> bytes:
    """An ELF64 file whose only section with contents is `.nv_fatbin`."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at = 64
    table = at + len(section) + len(names)
    header = struct.pack("<5s35xQ", b"\x7fELF\x02", table).ljust(58, b"\0")
    header += struct.pack("<HHH", 64, 3, 2)

    def described(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size).ljust(64, b"\0")

    sections = described(0, 0, 0) + described(1, at, len(section))
    return header + section + names + sections + described(12, at + len(section), len(names))


OURS, OLDER, TEXT = (entry(ELF_IMAGE, 90, b"h" * 40), entry(ELF_IMAGE, 80, b"a" * 16),
                     entry(PTX, 80, b"p" * 48))  # fmt: skip


def test_device_code_of_one_architecture_is_left() -> None:
    """Catches: an image of another architecture kept, PTX kept, a container emptied, a container
    behind padding missed, anything moved."""
    before = library(container(OLDER, OURS, TEXT) + bytes(16) + container(OLDER, TEXT))
    after, size, left = prune(before, 90)
    assert len(after) == len(before)
    first = 64 + 16
    assert after[first : first + len(OURS)] == OURS
    assert not after[first + len(OURS) : 64 + 16 + len(OLDER + OURS + TEXT)].strip(b"\0")
    second = 64 + 16 + len(OLDER + OURS + TEXT) + 16
    assert struct.unpack_from("<IHHQ", after, second)[0] == CONTAINER_MAGIC
    assert struct.unpack_from("<IHHQ", after, second)[3] == len(OLDER)
    assert after[second + 16 :].startswith(OLDER + bytes(len(TEXT)))
    assert (size, left) == (len(OLDER + OURS + TEXT + OLDER + TEXT), len(OURS + OLDER))
    assert prune(after, 90)[0] == after


def test_a_library_without_code_for_the_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="sm_100"):
        prune(library(container(OURS, TEXT)), 100)
    with pytest.raises(ValueError, match="ELF64"):
        prune(b"no library", 90)


def test_what_no_check_runs_is_stripped_and_the_rest_is_packed(tmp_path: Path) -> None:
    vllm = tmp_path / "site" / "vllm"
    code = library(container(OLDER, OURS))
    contents: dict[str, bytes] = {
        "engine.py": b"", "configs/moe.json": b"{}", "tool.jinja": b"", "page.html": b"",
        "third_party/deep_gemm/a.py": b"", "_qutlass_C.abi3.so": code, "spinloop.abi3.so": code,
        "_C_stable_libtorch.abi3.so": code, "_moe_C_stable_libtorch.abi3.so": code,
        "vllm_flash_attn/_vllm_fa3_C.abi3.so": code, "vllm_flash_attn/_vllm_fa2_C.abi3.so": code,
    }  # fmt: skip
    for name, content in contents.items():
        (vllm / name).parent.mkdir(parents=True, exist_ok=True)
        (vllm / name).write_bytes(content)
    strip(tmp_path / "site", 90)
    compress(tmp_path / "site", tmp_path / "out.tar.xz")
    with tarfile.open(tmp_path / "out.tar.xz") as tar:
        packed = {name.removeprefix("vllm/") for name in tar.getnames()}
        member = tar.extractfile("vllm/_C_stable_libtorch.abi3.so")
        assert member is not None and member.read() == prune(code, 90)[0]
    gone = {"page.html", "third_party/deep_gemm/a.py", "_qutlass_C.abi3.so",
            "vllm_flash_attn/_vllm_fa2_C.abi3.so"}  # fmt: skip
    assert packed == set(contents) - gone
    (vllm / "_C_stable_libtorch.abi3.so").unlink()
    with pytest.raises(ValueError, match="_C_stable_libtorch"):
        strip(tmp_path / "site", 90)
