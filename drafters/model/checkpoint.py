"""Reading and writing a head: config.json and model.safetensors under vLLM's names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.model.head_check import MAPS, UNUSED, plain_name
from drafters.model.head_values import head_problems
from drafters.model.weight_files import read_weights

WEIGHTS = "model.safetensors"


def head_weights(head: DraftHead) -> dict[str, torch.Tensor]:
    """The head's own tensors under vLLM's names, without those that it borrows from the target."""
    return {name: value.detach().contiguous() for name, value in head.state_dict().items()}


def save_head(head: DraftHead, folder: Path) -> None:
    """Write the checkpoint in the head's own dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    save_file(head_weights(head), folder / WEIGHTS, metadata={"format": "pt"})
    document = head.config.to_json(dtype)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")


def load_head(
    folder: Path, dtype: torch.dtype | None = None, target_layers: int | None = None
) -> DraftHead:
    """Read a checkpoint of either layout. Raises ValueError, which names the tensors, for those
    that are missing, unknown, of another type or shape, or not finite.

    `target_layers` is the target's depth, needed where the head does not name its taps. Without a
    `dtype` the head has that of its norms, since matrices may be stored in 8 bits
    (`drafters.model.round_weights`).
    """
    config = HeadConfig.load(folder, target_layers)
    if problems := head_problems(folder, config):
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    weights = {
        plain_name(name): value
        for name, value in _tensors(folder).items()
        if not name.endswith(UNUSED)
    }
    if config.draft_vocab_size is None:
        weights = {name: value for name, value in weights.items() if name not in MAPS}
    elif "t2d" not in weights:
        weights["t2d"] = _drafted(weights["d2t"], config.vocab_size)
    if "mask_hidden" in weights:  # the speculators library keeps a batch dimension
        weights["mask_hidden"] = weights["mask_hidden"].view(1, -1)
    head = DraftHead(
        config,
        own_embeddings="embed_tokens.weight" in weights,
        own_lm_head="lm_head.weight" in weights,
    )
    head = head.to(dtype or weights["norm.weight"].dtype)
    head.load_state_dict(weights)
    return head.eval()


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder: safetensors in one file or in shards, else torch's own files."""
    files = sorted({tensor.file for tensor in read_weights(folder).tensors.values()})
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    if not files:
        for file in sorted(folder.glob("*.bin")):
            tensors |= torch.load(file, map_location="cpu", weights_only=True)
    return tensors


def _drafted(d2t: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """`t2d` from `d2t`: which target ids can be drafted, bool `[vocabulary]`."""
    drafted = torch.zeros(vocabulary, dtype=torch.bool)
    drafted[torch.arange(len(d2t)) + d2t.long()] = True
    return drafted
