"""Reading and writing a head: config.json and model.safetensors under vLLM's names.

A path selector is in a file of its own, selector/model.safetensors: vLLM's loaders read the files
of the head's own folder, and refuse tensors that they do not know.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.model.head_check import MAPS, QUANTISED, SELECTOR, SELECTOR_FILE, UNUSED, plain_name
from drafters.model.head_values import head_problems, load_torch_file, torch_files
from drafters.model.selector import PathSelector
from drafters.model.weight_files import read_weights
from drafters.tensor_files import read_tensors, write_tensors

WEIGHTS = "model.safetensors"


def head_weights(head: DraftHead) -> dict[str, torch.Tensor]:
    """The head's own tensors under vLLM's names, without those that it borrows from the target and
    those of its path selector."""
    return {
        name: value.detach().contiguous()
        for name, value in head.state_dict().items()
        if not name.startswith(f"{SELECTOR}.")
    }


def save_selector(head: DraftHead, folder: Path) -> None:
    """Write a head's path selector below its folder. A head without one loses what was there.
    Raises OSError."""
    file = folder / SELECTOR_FILE
    if head.selector is None:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().contiguous() for name, value in head.selector.state_dict().items()
    }
    write_tensors(weights, file)


def load_selector(folder: Path, config: HeadConfig) -> PathSelector | None:
    """Read the path selector alone of a checkpoint, for a head that vLLM has loaded; None where the
    head's configuration has none. Raises ValueError as `load_head` does."""
    if config.path_selector is None:
        return None
    _refuse_problems(folder, config)
    weights = read_tensors(folder / SELECTOR_FILE)
    selector = PathSelector(config.path_selector, config).to(weights["state.bias"].dtype)
    selector.load_state_dict(weights)
    return selector.eval()


def add_selector_file(head: DraftHead, source: Path, folder: Path) -> None:
    """Write a copy of the checkpoint in `source`, in its layout and types, with the path selector
    of `head`. The two folders may be one."""
    if folder.resolve() != source.resolve():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    save_selector(head, folder)
    file = folder / "config.json"
    selector = head.config.path_selector
    document = json.loads(file.read_text()) | {"path_selector": selector and asdict(selector)}
    file.write_text(json.dumps(document, indent=2) + "\n")


def save_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a head's weights in the place of all that its folder has, which may be in shards or in
    torch's own files. Those in folders within it stay. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(weights, folder / WEIGHTS)
    for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"):
        for file in folder.glob(pattern):
            if file.name != WEIGHTS:
                file.unlink()


def save_head(head: DraftHead, folder: Path) -> None:
    """Write the checkpoint in the head's own dtype."""
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    save_weights(head_weights(head), folder)
    save_selector(head, folder)
    document = head.config.to_json(dtype)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")


def load_head(
    folder: Path, dtype: torch.dtype | None = None, target_layers: int | None = None
) -> DraftHead:
    """Read a checkpoint of either layout. Raises ValueError, which names the tensors, for those
    that are missing, unknown, of another type or shape, or not finite.

    Draft ids are in the order of their target ids, even where the file has another order.
    `target_layers` is the target's depth, needed where the head does not name its taps. Without a
    `dtype` the head has that of its norms, since matrices may be stored in 8 bits
    (`drafters.model.round_weights`).
    """
    config = HeadConfig.load(folder, target_layers)
    if json.loads((folder / "config.json").read_text()).get(QUANTISED):
        raise ValueError(f"{folder}: quantised heads ({QUANTISED}) are served, and not read here")
    _refuse_problems(folder, config)
    weights = {
        plain_name(name): value
        for name, value in stored_tensors(folder).items()
        if not name.endswith(UNUSED)
    }
    if config.draft_vocab_size is None:
        weights = {name: value for name, value in weights.items() if name not in MAPS}
    else:
        _sort_draft_vocabulary(weights, config.vocab_size)
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


def _refuse_problems(folder: Path, config: HeadConfig) -> None:
    if problems := head_problems(folder, config):
        raise ValueError(f"{folder}: {'; '.join(problems)}")


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder: safetensors in one file or in shards, else torch's own files; and
    those of a path selector, with the prefix `selector.`."""
    files = sorted({tensor.file for tensor in read_weights(folder).tensors.values()})
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= read_tensors(file)
    if not files:
        for file in torch_files(folder):
            tensors |= load_torch_file(file)
    selector = folder / SELECTOR_FILE
    if selector.is_file():
        tensors |= {f"{SELECTOR}.{name}": value for name, value in read_tensors(selector).items()}
    return tensors


def _sort_draft_vocabulary(weights: dict[str, torch.Tensor], vocabulary: int) -> None:
    """Put a draft vocabulary into the order of its target ids, as training expects it, and make
    `t2d` from it, which not every file has. Other libraries list the commonest token first."""
    draft_ids = torch.arange(len(weights["d2t"]))
    ids, order = (draft_ids + weights["d2t"].long()).sort()
    weights["d2t"] = ids - draft_ids
    weights["lm_head.weight"] = weights["lm_head.weight"][order]
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool)
    weights["t2d"][ids] = True
