"""The corpus: the Python standard library's own source, split by path.

Licence of the text: PSF-2.0. Nothing is downloaded: the files are those of the interpreter
that runs this module, so every machine with the same Python has the same corpus.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 3
# `encodings` is 2 MB of generated tables of code points, which teach nothing about Python.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings"})
# Longer files are test vectors and opcode tables; pydoc's topics are prose and stay.
_MAX_BYTES = 400_000
_ALWAYS = frozenset({"pydoc_data/topics.py"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus. `path` is relative to the library's root, with forward slashes."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training."""
        return is_held_out(self.path)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The deduplicated files, sorted by path, and a hash of their paths and contents."""

    files: tuple[SourceFile, ...]
    sha256: str

    @property
    def train(self) -> tuple[SourceFile, ...]:
        """Files that models are trained on."""
        return tuple(file for file in self.files if not file.held_out)

    @property
    def held_out(self) -> tuple[SourceFile, ...]:
        """Files that are kept from training."""
        return tuple(file for file in self.files if file.held_out)


def is_held_out(path: str) -> bool:
    """Whether a file is kept from training, by a hash of its relative path alone.

    Contents differ between releases of Python and paths hardly do, so that 3.11.2 and 3.12.9 have
    the same split.
    """
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 100
    return bucket < HELD_OUT_PERCENT


def standard_library() -> Path:
    """The folder that holds the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def load_corpus(root: Path | None = None) -> Corpus:
    """Read, filter and deduplicate every `.py` file under `root`."""
    files: dict[str, SourceFile] = {}
    digest = hashlib.sha256()
    for path, text in _read(root or standard_library()):
        key = hashlib.sha256(text.encode()).hexdigest()
        if key in files:
            continue
        files[key] = SourceFile(path, text)
        digest.update(f"{path}\0{key}\n".encode())
    return Corpus(tuple(files.values()), digest.hexdigest())


def _read(root: Path) -> Iterator[tuple[str, str]]:
    """(relative path, text) of each usable file, sorted by path."""
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        name = relative.as_posix()
        if file.stat().st_size > _MAX_BYTES and name not in _ALWAYS:
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the library keeps a few files in other encodings to test the tokenizer
        text = text.replace("\r\n", "\n").strip("\n\f ")
        if len(text) >= 64:  # empty package markers teach nothing
            yield name, text + "\n"
