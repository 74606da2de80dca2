"""Reading and writing a head: config.json and model.safetensors under vLLM's names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafters.model.config import HeadConfig
from drafters.model.peagle import PEagleHead


def save_head(head: PEagleHead, folder: Path) -> None:
    """Write the checkpoint in the head's own dtype. No lm_head: the target's is shared."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    document = head.config.to_json(dtype)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")


def load_head(folder: Path, dtype: torch.dtype | None = None) -> PEagleHead:
    """Read a checkpoint; missing and unknown weights raise."""
    weights = load_file(folder / "model.safetensors")
    head = PEagleHead(HeadConfig.load(folder)).to(dtype or weights["fc.weight"].dtype)
    head.load_state_dict(weights)
    return head.eval()
