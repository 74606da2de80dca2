"""provenance.json beside a checkpoint: all that is needed to make it again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers


def write_provenance(
    folder: Path, argv: Sequence[str], seed: int, facts: Mapping[str, object]
) -> None:
    """Write the record beside the weights in `folder`; `facts` are the run's own figures."""
    document = run_record(argv, seed, facts)
    (folder / "provenance.json").write_text(json.dumps(document, indent=2) + "\n")


def run_record(argv: Sequence[str], seed: int, facts: Mapping[str, object]) -> dict[str, object]:
    """The record of a run: its command, the code, the versions and the machine, and `facts`."""
    return {
        # Folders differ from machine to machine and mean nothing elsewhere.
        "argv": [Path(word).name if "/" in word else word for word in argv],
        "seed": seed,
        "git": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **facts,
    }


def read_provenance(folder: Path | None) -> dict[str, Any] | None:
    """Read the record in `folder`; None if there is none. A run that starts from a checkpoint keeps
    that one's record as `init`."""
    file = folder / "provenance.json" if folder else None
    return json.loads(file.read_text()) if file and file.exists() else None


def _revision() -> str | None:
    """The commit of the code that ran; None outside a repository, and where there is no git, as in
    the container image."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() or None
