"""Heads that draft worse than the one they were made of."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def noised(head: Path, folder: Path, share: float, seed: int = 0) -> Path:
    """A copy of a checkpoint in `folder`, with noise on its matrices of `share` of their standard
    deviation."""
    shutil.copytree(head, folder)
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(file)
    for name, weight in weights.items():
        if weight.ndim == 2 and weight.is_floating_point():
            wide = weight.float()
            noise = torch.randn(wide.shape, generator=generator) * wide.std() * share
            weights[name] = (wide + noise).to(weight.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return folder
