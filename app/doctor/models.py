"""Checks of the target and its draft head, from their files alone: nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.doctor import chat_template
from app.doctor.report import Finding, fail, ok, warn
from app.doctor.weight_files import read_weights
from drafters.model.config import HeadConfig, Method, default_taps, method_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json")
TAPS = 3  # how many hidden states of the target an EAGLE-3 head reads when it does not say which
KINDS: dict[Method, str] = {"p-eagle": "P-EAGLE", "eagle3": "EAGLE-3"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a model folder says about itself."""

    folder: str
    config: Mapping[str, Any]
    shapes: Mapping[str, list[int]] = field(default_factory=dict)  # tensor -> its shape
    files: frozenset[str] = frozenset()
    weights_bytes: int = 0
    chat_template: str | None = None  # empty: there is none; None: not read
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
    weights = read_weights(folder)
    provenance = folder / "provenance.json"
    record = json.loads(provenance.read_text("utf-8")) if provenance.exists() else {}
    return Checkpoint(
        folder=str(folder),
        config=config,
        shapes=weights.shapes,
        files=frozenset(file.name for file in folder.iterdir()),
        weights_bytes=weights.size,
        chat_template=chat_template.read(folder),
        trained_k=record.get("k_train"),
    )


def check_target(target: Checkpoint, max_model_len: int | None, *, weights: bool = True) -> Finding:
    """Check that the target can be served at the length asked for."""
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


def check_head(
    head: Checkpoint,
    target: Checkpoint,
    k: int,
    *,
    trained_k: int | None = None,
    max_model_len: int | None = None,
    dtype: str = "auto",
    weights: bool = True,
) -> Finding:
    """Check that the head was made for this target, and has a shape that `aerie serve` drafts with.

    The finding names everything that does not fit. `trained_k` is the K that a preset says the head
    was trained for; `max_model_len` and `dtype` are the settings. Without `weights` no tensors are
    checked.
    """
    config, text = head.text(), target.text()
    kind = method_of(head.config)
    problems = [*_sizes_differ(config, text), *_unsupported(head.config, text)]
    if kind == "p-eagle" and config.get("parallel_drafting") is False:
        problems.append("config.json sets parallel_drafting to false")
    if weights:
        problems += _tensors_unfit(head, text, kind)
    if problems:
        return fail(
            "head",
            f"{head.folder}: {'; '.join(problems)}",
            "--drafter with a P-EAGLE or EAGLE-3 head of this model, or --k 0",
        )
    taps = _taps(config) or f"vLLM's default layers {list(_default_taps(text))}"
    detail = f"{KINDS[kind]}, {config.get('num_hidden_layers')} layers, taps {taps}, K {k}"
    trained_k = head.trained_k or trained_k
    warnings = _warnings(head, target, max_model_len, dtype)
    if trained_k is not None and k > trained_k:
        warnings[f"K {k} is over the {trained_k} that it was trained for"] = (
            f"--k {trained_k}: later positions are rarely accepted"
        )
    if warnings:
        return warn("head", f"{detail}; {'; '.join(warnings)}", "; ".join(warnings.values()))
    return ok("head", detail)


_TAP_IDS = "eagle_aux_hidden_state_layer_ids"


def _taps(head: Mapping[str, Any]) -> list[int]:
    """The layers that a head names, in either of two places; empty: vLLM's default."""
    nested = head.get("eagle_config")
    found = head.get(_TAP_IDS) or (nested.get(_TAP_IDS) if isinstance(nested, Mapping) else None)
    return list(found or ())


def _default_taps(target: Mapping[str, Any]) -> tuple[int, ...]:
    return default_taps(target.get("num_hidden_layers", 0))


def _unsupported(head: Mapping[str, Any], target: Mapping[str, Any]) -> list[str]:
    """What a head's configuration asks for that is not supported, by its key."""
    try:
        HeadConfig.from_json(head, target.get("num_hidden_layers"))
    except (ValueError, TypeError) as error:
        return [str(error)]
    return []


def _sizes_differ(head: Mapping[str, Any], target: Mapping[str, Any]) -> list[str]:
    problems = []
    hidden = head.get("target_hidden_size") or head.get("hidden_size")
    if hidden != target.get("hidden_size"):
        problems.append(
            f"reads hidden size {hidden}, the target has {target.get('hidden_size')}: it was "
            "made for another model"
        )
    if head.get("vocab_size") != target.get("vocab_size"):
        problems.append(
            f"vocabulary {head.get('vocab_size')}, the target has {target.get('vocab_size')}: "
            "its drafts would be other tokens"
        )
    layers = target.get("num_hidden_layers", 0)
    problems += [
        f"taps layer {tap}, the target has {layers}"
        for tap in _taps(head)
        if not 0 <= tap <= layers
    ]
    return problems


def _tensors_unfit(head: Checkpoint, target: Mapping[str, Any], kind: Method) -> list[str]:
    config, shapes = head.text(), head.shapes
    if not shapes and any(file.endswith(".bin") for file in head.files):
        return []  # torch's own files say nothing before they are loaded
    problems = []
    taps = len(_taps(config)) or TAPS
    width = taps * target.get("hidden_size", 0)
    mask = shapes.get("mask_hidden")
    if kind == "eagle3":
        if mask is not None:
            problems.append("has mask_hidden, as P-EAGLE heads do, but config.json no ptd_token_id")
    elif mask is None:
        problems.append("no mask_hidden among its tensors, so it cannot draft in parallel")
    elif mask[-1] != width:
        problems.append(f"mask_hidden is {mask[-1]} wide, {taps} taps of this target make {width}")
    if (fc := shapes.get("fc.weight")) is not None and fc[-1] != width:
        problems.append(f"fc reads {fc[-1]} values, {taps} taps of this target make {width}")
    vocabulary = config.get("vocab_size", 0)
    drafts = config.get("draft_vocab_size") or vocabulary
    if drafts < vocabulary and "d2t" not in shapes:
        problems.append("draft_vocab_size is smaller than vocab_size, but no d2t tensor maps it")
    for name in ("d2t", "lm_head.weight"):
        if (shape := shapes.get(name)) is not None and drafts and shape[0] != drafts:
            problems.append(f"{name} has {shape[0]} rows, the draft vocabulary has {drafts}")
    return problems


def _warnings(
    head: Checkpoint, target: Checkpoint, max_model_len: int | None, dtype: str
) -> dict[str, str]:
    """Problems with which the head still works -> their remedies."""
    config, text = head.text(), target.text()
    warnings: dict[str, str] = {}
    longest, wanted = config.get("max_position_embeddings"), max_model_len
    wanted = wanted or text.get("max_position_embeddings")
    if longest and wanted and longest < wanted:
        warnings[f"it knows {longest} positions, requests may have {wanted}"] = (
            f"--max-model-len {longest}, or a head for long contexts"
        )
    stored = config.get("dtype") or config.get("torch_dtype")
    served = (text.get("dtype") or text.get("torch_dtype")) if dtype == "auto" else dtype
    if stored and served and {stored, served} == {"float16", "bfloat16"}:
        warnings[f"stored in {stored}, served in {served}"] = (
            f"--dtype {stored}, or accept fewer drafts: the two round differently"
        )
    made_for = _made_for(head.config)
    name = Path(target.folder).name
    if made_for and Path(made_for).name != name and not Path(target.folder).is_dir():
        warnings[f"it names {made_for} as its target"] = "expect lower acceptance on another model"
    return warnings


def _made_for(config: Mapping[str, Any]) -> str | None:
    """The target that a head in the speculators library's layout names."""
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    return verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
