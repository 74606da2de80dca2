"""Checks of the target and its P-EAGLE head, from their files alone: nothing is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.doctor.report import Finding, fail, ok, warn

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json")
MAX_HEADER_BYTES = 100 * 1024**2  # what the safetensors format allows
PLACEHOLDERS = ("ptd_token_id", "mask_token_id", "pard_token")  # names vLLM reads for one thing
TAPS = 3  # how many hidden states of the target an EAGLE-3 head reads when it does not say which


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a model folder says about itself."""

    folder: str
    config: Mapping[str, Any]
    shapes: Mapping[str, list[int]] = field(default_factory=dict)  # tensor -> its shape
    files: frozenset[str] = frozenset()
    weights_bytes: int = 0
    trained_k: int | None = None  # from provenance.json, where the head's training wrote one

    def text(self) -> Mapping[str, Any]:
        """The language model's values; multimodal and speculators' configurations nest them."""
        flat = dict(self.config)
        for key in ("text_config", "transformer_layer_config"):
            nested = self.config.get(key)
            flat.update(nested if isinstance(nested, Mapping) else {})
        return flat


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read configuration and tensor shapes. Raises OSError or ValueError, saying what is wrong."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if not isinstance(config, dict):
        raise ValueError("config.json is not a JSON object")
    weights = sorted(folder.glob("*.safetensors"))
    shapes: dict[str, list[int]] = {}
    for file in weights:
        shapes.update(_shapes(file))
    provenance = folder / "provenance.json"
    record = json.loads(provenance.read_text("utf-8")) if provenance.exists() else {}
    return Checkpoint(
        folder=str(folder),
        config=config,
        shapes=shapes,
        files=frozenset(file.name for file in folder.iterdir()),
        weights_bytes=sum(file.stat().st_size for file in weights),
        trained_k=record.get("k_train"),
    )


def _shapes(file: Path) -> dict[str, list[int]]:
    """Tensor names and shapes from the header; the weights stay on disk."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(size))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def check_target(target: Checkpoint, max_model_len: int | None, *, weights: bool = True) -> Finding:
    """The target can be served at the length asked for."""
    text = target.text()
    architecture = ", ".join(target.config.get("architectures") or ["no architecture"])
    longest = text.get("max_position_embeddings")
    detail = f"{architecture}, vocabulary {text.get('vocab_size')}, length {longest}"
    if not target.config.get("architectures"):
        return fail("model", f"{target.folder}: config.json names no architecture", _ANOTHER)
    if weights and not target.shapes:
        return fail("model", f"{target.folder} has no *.safetensors", _ANOTHER)
    if not target.files.intersection(TOKENIZER_FILES):
        return fail("model", f"{target.folder} has no tokenizer", _ANOTHER)
    if max_model_len and longest and max_model_len > longest:
        return fail(
            "model",
            f"--max-model-len {max_model_len} is over the model's {longest}",
            f"--max-model-len {longest} or less",
        )
    return ok("model", detail)


_ANOTHER = "--model FOLDER with config.json, *.safetensors and a tokenizer"


def check_head(head: Checkpoint, target: Checkpoint, k: int, *, weights: bool = True) -> Finding:
    """The head was made for this target and drafts all K tokens in one pass."""
    config, text = head.text(), target.text()
    problem = (
        _sizes_differ(config, text)
        or _placeholder_missing(config)
        or (_tensors_unfit(head, text) if weights else None)
    )
    if problem:
        return fail(
            "head",
            f"{head.folder}: {problem}",
            "--drafter with this model's P-EAGLE head, or --k 0",
        )
    taps = config.get("eagle_aux_hidden_state_layer_ids") or "vLLM's default layers"
    detail = f"{config.get('num_hidden_layers')} layers, taps {taps}, K {k}"
    if head.trained_k is not None and k > head.trained_k:
        return warn(
            "head",
            f"{detail} is over the {head.trained_k} that it was trained for",
            f"--k {head.trained_k}: later positions are rarely accepted",
        )
    return ok("head", detail)


def _sizes_differ(head: Mapping[str, Any], target: Mapping[str, Any]) -> str | None:
    hidden = head.get("target_hidden_size", head.get("hidden_size"))
    if hidden != target.get("hidden_size"):
        return f"reads hidden size {hidden}, the target has {target.get('hidden_size')}"
    if head.get("vocab_size") != target.get("vocab_size"):
        return f"vocabulary {head.get('vocab_size')}, the target has {target.get('vocab_size')}"
    layers = target.get("num_hidden_layers", 0)
    for tap in head.get("eagle_aux_hidden_state_layer_ids") or ():
        if not 0 <= tap <= layers:
            return f"taps layer {tap}, the target has {layers}"
    return None


def _placeholder_missing(head: Mapping[str, Any]) -> str | None:
    token = next((head[name] for name in PLACEHOLDERS if head.get(name) is not None), None)
    if token is None:
        return "config.json has no ptd_token_id, so it cannot draft in parallel"
    if not 0 <= token < head.get("vocab_size", 0):
        return f"placeholder token {token} is outside its vocabulary"
    if head.get("parallel_drafting") is False:
        return "config.json sets parallel_drafting to false"
    return None


def _tensors_unfit(head: Checkpoint, target: Mapping[str, Any]) -> str | None:
    config, mask = head.text(), head.shapes.get("mask_hidden")
    if mask is None:
        return "no mask_hidden among its tensors, so it cannot draft in parallel"
    taps = len(config.get("eagle_aux_hidden_state_layer_ids") or range(TAPS))
    width = taps * target.get("hidden_size", 0)
    if mask[-1] != width:
        return f"mask_hidden is {mask[-1]} wide, {taps} taps of this target make {width}"
    vocabulary = config.get("vocab_size", 0)
    if (config.get("draft_vocab_size") or vocabulary) < vocabulary and "d2t" not in head.shapes:
        return "draft_vocab_size is smaller than vocab_size, but no d2t tensor maps it back"
    return None
