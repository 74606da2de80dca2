"""Pack the source tree without what a check on another machine does not read.

    python -m deploy.offline.lean_tree --out aerie-tree.tar.xz

Files that git does not ignore travel as they are on disk, without weights, texts to train on,
results, and the pictures of the documentation. Configs and tokenizers of the models stay:
`bench/systems/model_free.py` makes its models of them. The file COMMIT says of which commit the
tree is, for the provenance of results.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = "aerie"  # folder that the tree unpacks to
COMMIT = "COMMIT"
LEFT_OUT = (".safetensors", ".jsonl.gz")
LEFT_OUT_FOLDERS = ("bench/results", "docs/images")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tree; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        paths = travelling(files())
        unpacked = pack(paths, _git("describe", "--always", "--dirty").strip(), options.out)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"lean tree: {error}", file=sys.stderr)
        return 1
    packed = options.out.stat().st_size / 2**20
    print(f"lean tree: {options.out}: {len(paths)} files, {unpacked / 2**20:.1f} MiB unpacked, "
          f"{packed:.1f} MiB packed")  # fmt: skip
    return 0


def files() -> list[str]:
    """Files that are tracked or will be, as paths relative to the repository: a module that is not
    committed yet travels with the ones that import it."""
    return _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")


def travelling(names: Sequence[str]) -> list[str]:
    """Those of `names`, paths relative to the repository, that are in the tree."""
    return [
        name
        for name in names
        if name
        and not name.endswith(LEFT_OUT)
        and not any(PurePosixPath(name).is_relative_to(folder) for folder in LEFT_OUT_FOLDERS)
    ]


def pack(paths: Sequence[str], commit: str, out: Path) -> int:
    """Write a .tar.xz of these files of the repository and of COMMIT. Returns their bytes before
    compression; a tracked file that was deleted is left out."""
    out.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with tarfile.open(out, "w:xz", preset=9) as tar:
        for name in paths:
            file = REPOSITORY / name
            if file.is_file():
                tar.add(file, f"{ROOT}/{name}")
                size += file.stat().st_size
        member, content = tarfile.TarInfo(f"{ROOT}/{COMMIT}"), f"{commit}\n".encode()
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return size + len(content)


def _git(*arguments: str) -> str:
    line = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.offline.lean_tree",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .tar.xz")
    return parser


if __name__ == "__main__":
    sys.exit(main())
