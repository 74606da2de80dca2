"""Checks of the target and its draft head, from their files alone: nothing is loaded.

What is said of a head's tensors is what `aerie evaluate` and `aerie train --init` say
(drafters/model/head_check.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.doctor import chat_template
from app.doctor.report import Finding, fail, ok, unless_given, warn
from app.presets.about import BYTES, HeadFacts, longest_of
from drafters.model.config import HeadConfig, Method, default_taps, method_of
from drafters.model.head_check import (
    QUANTISED,
    TargetSizes,
    plain_name,
    target_problems,
    tensor_problems,
)
from drafters.model.head_values import read_head, value_problems
from drafters.model.weight_files import StoredTensor, read_weights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "merges.txt",  # beside vocab.json
)
# vLLM's engine arguments with which a target may be served whose folder alone could not be.
_OTHER_CONFIG = ("hf_overrides", "hf_config_path", "config_format")
_OTHER_WEIGHTS = ("load_format",)
_OTHER_TOKENIZER = ("tokenizer", "tokenizer_mode", "skip_tokenizer_init")
# vLLM's classes that generate text with recurrent layers: Mamba, short convolutions, gated delta
# nets and the like (`IsHybrid` in vllm/model_executor/models and vllm/models).
RECURRENT = frozenset({
    "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration", "FalconH1ForCausalLM", "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration", "GraniteMoeHybridForCausalLM",
    "InternS2MobiusForConditionalGeneration", "InternS2PreviewForConditionalGeneration",
    "JambaForCausalLM", "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM",
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration",
    "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3",
    "OlmoHybridForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration",
    "Zamba2ForCausalLM",
})  # fmt: skip
_ATTENTION = ("attention", "full_attention")
# Keys of a target's config.json for what TargetSizes holds, in its order.
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")
KINDS: dict[Method, str] = {"p-eagle": "P-EAGLE", "eagle3": "EAGLE-3"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a model folder says about itself."""

    folder: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)  # by name
    files: frozenset[str] = frozenset()
    weights_bytes: int = 0
    missing_bytes: int = 0  # of the weights, those that have yet to be downloaded
    chat_template: str | None = None  # empty: there is none; None: not read
    trained_k: int | None = None  # from provenance.json, where the head's training wrote one
    broken_values: tuple[str, ...] = ()  # of a head: tensors with values that cannot be used

    def text(self) -> Mapping[str, Any]:
        """The language model's values; multimodal and speculators' configurations nest them."""
        flat = dict(self.config)
        for key in ("text_config", "transformer_layer_config"):
            nested = self.config.get(key)
            flat.update(nested if isinstance(nested, Mapping) else {})
        return flat

    def bytes_in(self, dtype: str) -> float:
        """Bytes of the weights once they are loaded as `dtype`; `auto` and quantised ones are
        loaded as they are stored."""
        stored = self.text().get("dtype") or self.text().get("torch_dtype")
        if dtype == "auto" or stored not in BYTES or "quantization_config" in self.config:
            return self.weights_bytes
        return self.weights_bytes * BYTES[dtype] / BYTES[stored]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read configuration and tensor shapes. Raises OSError or ValueError, saying what is wrong."""
    config = _read_object(folder / "config.json")
    weights = read_weights(folder)
    provenance = folder / "provenance.json"
    record = _read_object(provenance) if provenance.exists() else {}
    return Checkpoint(
        folder=str(folder),
        config=config,
        tensors=weights.tensors,
        files=frozenset(file.name for file in folder.iterdir()),
        weights_bytes=weights.size,
        chat_template=chat_template.read(folder),
        trained_k=record.get("k_train"),
    )


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises OSError, and ValueError naming the file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"has no {file.name}") from None
    except (ValueError, RecursionError) as error:  # bytes that are no text are a ValueError, too
        raise ValueError(f"{file.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return content


def read_checked_head(target_layers: int | None, folder: Path) -> Checkpoint:
    """Read a head as `read_checkpoint` does, and the values of its tensors.

    `target_layers` is the target's depth, if it is known. Raises OSError or ValueError.
    """
    head = replace(read_checkpoint(folder), tensors=read_head(folder))
    if head.config.get(QUANTISED):
        return head
    config = _config(head.config, target_layers)
    if isinstance(config, str) or tensor_problems(config, head.tensors):
        return head  # check_head names these, and no more can be read
    return replace(head, broken_values=tuple(value_problems(folder, config)))


def check_target(
    target: Checkpoint,
    max_model_len: int | None,
    *,
    weights: bool = True,
    engine_args: Mapping[str, Any] | None = None,
    any_length: bool = False,
) -> Finding:
    """Check that the target can be served at the length asked for.

    What `engine_args` may change is a warning. With `any_length` vLLM takes lengths beyond the
    model's (VLLM_ALLOW_LONG_MAX_MODEL_LEN).
    """
    given, text = engine_args or {}, target.text()
    findings = []
    architectures = _architectures(target.config)
    longest = longest_of(text)
    detail = f"{', '.join(architectures)}, vocabulary {text.get('vocab_size')}, length {longest}"
    for name in _SIZES:
        size = text.get(name)
        if size is not None and not isinstance(size, int):
            problem = f"{target.folder}: {name} {size!r} in config.json is no whole number"
            findings.append(unless_given(fail("model", problem, _ANOTHER), given, _OTHER_CONFIG))
    if not architectures:
        problem = f"{target.folder}: config.json names no architecture"
        findings.append(unless_given(fail("model", problem, _ANOTHER), given, _OTHER_CONFIG))
    if weights and not target.tensors:
        problem = f"{target.folder} has no *.safetensors"
        findings.append(unless_given(fail("model", problem, _ANOTHER), given, _OTHER_WEIGHTS))
    if not target.files.intersection(TOKENIZER_FILES):
        problem = f"{target.folder} has no tokenizer"
        findings.append(unless_given(fail("model", problem, _ANOTHER), given, _OTHER_TOKENIZER))
    if max_model_len and longest and max_model_len > longest:
        problem = f"--max-model-len {max_model_len} is over the model's {longest}"
        remedy = f"--max-model-len {longest} or less"
        if any_length:
            findings.append(warn("model", f"{problem}, which was allowed", remedy))
        else:
            findings.append(unless_given(fail("model", problem, remedy), given, _OTHER_CONFIG))
    findings.sort(key=lambda finding: finding.status != "FAIL")  # the worst one first
    return findings[0] if findings else ok("model", detail)


def is_recurrent(target: Checkpoint) -> bool:
    """Whether a target has recurrent layers, as vLLM has it (vllm/config/model.py, is_hybrid)."""
    if RECURRENT.isdisjoint(_architectures(target.config)):
        return False
    layers = target.config.get("layer_types")
    return not isinstance(layers, list) or not all(layer in _ATTENTION for layer in layers)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    """The architectures that a configuration names; none where it does not list names."""
    names = config.get("architectures")
    return names if isinstance(names, list) and all(isinstance(each, str) for each in names) else []


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
    problems = []
    if kind == "p-eagle" and config.get("parallel_drafting") is False:
        problems.append("config.json sets parallel_drafting to false")
    if _has_mrope(text) or _has_mrope(config):
        problems.append("M-RoPE (mrope_section), beside which no head drafts")
    read = _config(head.config, text.get("num_hidden_layers"))
    if isinstance(read, str):
        problems.append(read)
    else:
        own = frozenset(map(plain_name, head.tensors)) if weights else frozenset()
        problems += target_problems(read, _shape(text), own)
        # Of a hub's *.bin files nothing is known, and only vLLM reads quantised tensors.
        if weights and head.tensors and not head.config.get(QUANTISED):
            problems += tensor_problems(read, head.tensors) or head.broken_values
    if problems:
        return fail(
            "head",
            f"{head.folder}: {'; '.join(problems)}",
            "--drafter with a P-EAGLE or EAGLE-3 head of this model, or none: drafts by lookup",
        )
    taps = _taps(config) or f"vLLM's default layers {list(_default_taps(text))}"
    detail = f"{KINDS[kind]}, {config.get('num_hidden_layers')} layers, taps {taps}, K {k}"
    if not isinstance(read, str) and (selector := read.path_selector) is not None:
        detail += f", path selector {selector.kind} of rank {selector.rank}"
    trained_k = head.trained_k or trained_k
    warnings = _warnings(head, target, max_model_len, dtype)
    if head.config.get(QUANTISED):
        warnings["its tensors are quantised and were not checked"] = (
            "nothing, if it starts: vLLM reads them"
        )
    if trained_k is not None and k > trained_k:
        warnings[f"K {k} is over the {trained_k} that it was trained for"] = (
            f"--k {trained_k}: later positions are rarely accepted"
        )
    if warnings:
        return warn("head", f"{detail}; {'; '.join(warnings)}", "; ".join(warnings.values()))
    return ok("head", detail)


def head_facts(head: Checkpoint) -> HeadFacts | None:
    """Facts about a head for the estimate of memory, from its files; None if these do not say.

    Its tensors count two bytes a value whatever they are stored in, but quantised ones as they are.
    """
    config, size = head.text(), head.weights_bytes
    if not head.config.get(QUANTISED):
        size = 2 * sum(math.prod(tensor.shape) for tensor in head.tensors.values())
    try:
        return HeadFacts(
            method=method_of(head.config),
            parameters_b=size / 2e9,
            layers=config.get("num_hidden_layers") or 1,
            taps=len(_taps(config)) or 3,
        )
    except ValidationError:
        return None


_TAP_IDS = "eagle_aux_hidden_state_layer_ids"


def _has_mrope(config: Mapping[str, Any]) -> bool:
    """Whether a text's positions have several dimensions, as those of Qwen's vision models."""
    rotations = (config.get(key) for key in ("rope_parameters", "rope_scaling"))
    return any(isinstance(each, Mapping) and "mrope_section" in each for each in rotations)


def _taps(head: Mapping[str, Any]) -> list[int]:
    """The layers that a head names, in either of two places; empty: vLLM's default."""
    nested = head.get("eagle_config")
    found = head.get(_TAP_IDS) or (nested.get(_TAP_IDS) if isinstance(nested, Mapping) else None)
    return found if isinstance(found, list) else []


def _default_taps(target: Mapping[str, Any]) -> tuple[int, ...]:
    return default_taps(target.get("num_hidden_layers", 0))


def _config(head: Mapping[str, Any], target_layers: int | None) -> HeadConfig | str:
    """A head's configuration, or what it asks for that is not supported, by its key."""
    try:
        return HeadConfig.from_json(head, target_layers)
    except (ValueError, TypeError) as error:
        return str(error)


def _shape(target: Mapping[str, Any]) -> TargetSizes:
    values = (target.get(name) for name in _SIZES)
    return TargetSizes(*(value if isinstance(value, int) else 0 for value in values))


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
