"""Packages from an archive, on a machine that cannot install any."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.engine.configuration.cuda import NO_DEEP_GEMM, NO_FLASHINFER_SAMPLER

_UNPACKED = ".archive-sha256"
# The archive lacks FlashInfer and DeepGEMM, also where there is an nvcc. Without a network a
# machine cannot look up its own address.
_ENVIRONMENT = {**NO_FLASHINFER_SAMPLER, **NO_DEEP_GEMM, "VLLM_HOST_IP": "127.0.0.1"}


def unpack(archive: Path, site: Path) -> Path:
    """Unpack an archive of packages to `site`, unless it has been; returns `site`, absolute.

    Raises OSError if there is no such archive, ValueError if it is none or damaged, or if `site`
    holds something else, which is kept.
    """
    import lzma  # some builds of Python have none; they can do the rest of the check

    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    site, mark = site.resolve(), site.resolve() / _UNPACKED
    if mark.is_file() and mark.read_text("utf-8") == digest:
        return site
    if not mark.is_file() and site.exists() and (not site.is_dir() or any(site.iterdir())):
        raise ValueError(
            f"{site} holds something else than an unpacked archive: remove it, or give another "
            "folder as --site"
        )
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True, exist_ok=True)
    mark.write_text("unpacking", "utf-8")
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(site, filter="data")
            while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                pass  # up to the checksum at the end of the stream
    except (tarfile.TarError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
    mark.write_text(digest, "utf-8")
    return site


def register(repository: Path, site: Path) -> None:
    """Write the metadata of this project to `site`: vLLM finds the plugin by its entry point."""
    document = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    folder = site / f"{document['name']}-{document['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {document['name']}\nVersion: {document['version']}\n"
    (folder / "METADATA").write_text(metadata, "utf-8")
    groups = {"console_scripts": document["scripts"], **document["entry-points"]}
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")


def environment(environ: Mapping[str, str], site: Path, repository: Path) -> dict[str, str]:
    """The environment in which Python finds the packages and this project first."""
    path = [str(site), str(repository), *environ.get("PYTHONPATH", "").split(":")]
    cache = {"VLLM_CACHE_ROOT": str(site.parent / "vllm-cache")}
    return {**cache, **environ, **_ENVIRONMENT, "PYTHONPATH": ":".join(filter(None, path))}


def without_archive(argv: Sequence[str]) -> list[str]:
    """The command line without `--archive` and `--site`, in either spelling of their values."""
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in ("--archive", "--site"):
            rest.append(word)
        elif not equals:
            next(words, None)
    return rest
