"""Store the matrices of a checkpoint in 8 bits, half of what bfloat16 takes.

vLLM, transformers and `load_head` copy every stored tensor into a parameter of the type in which
the model computes, which config.json names. So float8_e4m3fn needs no other loader, and no scales
either: it has four significant bits for values from 2^-6 to 448, and less for smaller ones, while
the weights of a draft head and of a small target spread by about 0.1. Vectors (norms) stay as they
are, and so do the tables of a draft vocabulary and a path selector, which is in another file.

Usage: python -m drafters.model.round_weights FOLDER [FOLDER ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from drafters.model.checkpoint import WEIGHTS
from drafters.tensor_files import read_tensors, write_tensors

STORED = torch.float8_e4m3fn
# Root mean square of the rounding over that of the weights: 2.7% where no value is too small.
MOST_ERROR = 0.03


def round_weights(folder: Path) -> None:
    """Round the matrices of `model.safetensors` in place. Raises ValueError for a matrix that would
    lose more than MOST_ERROR, before anything is written, and for a damaged file; and OSError."""
    file, rounded = folder / WEIGHTS, {}
    for name, weight in read_tensors(file).items():
        if weight.ndim != 2 or len(weight) == 1 or not weight.is_floating_point():
            rounded[name] = weight
            continue
        rounded[name] = weight.to(STORED)
        wide = weight.float()
        error = float((rounded[name].float() - wide).norm() / wide.norm().clamp_min(1e-30))
        if not error <= MOST_ERROR:  # NaN where a value is beyond the type's range
            raise ValueError(f"{folder}: {name} would be off by {error:.1%} in {STORED}")
    mode = file.stat().st_mode
    write_tensors(rounded, file)
    file.chmod(mode)  # safetensors lets nobody else read what it writes


def main(argv: Sequence[str] | None = None) -> int:
    """Round the checkpoints of the folders on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m drafters.model.round_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    for folder in parser.parse_args(argv).folders:
        try:
            round_weights(folder)
        except (OSError, ValueError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
