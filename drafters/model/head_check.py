"""Whether a draft head has the tensors that it needs, and was made for a target.

`aerie doctor`, the start of `aerie serve`, `aerie evaluate` and `aerie train --init` all ask here
and in `drafters.model.head_values`, which reads the tensors. They are compared with what
`DraftHead` has, which is what vLLM's class loads (vllm/model_executor/models/llama_eagle3.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from drafters.model.config import HeadConfig
from drafters.model.weight_files import StoredTensor

Shape = tuple[int, ...]

# Tables that other libraries store and every reader computes.
UNUSED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
MAPS = ("d2t", "t2d")  # of a draft vocabulary
QUANTISED = "quantization_config"  # in config.json, of a head whose weights have scales
SELECTOR = "selector"  # the folder within a head's of its path selector, and where a head has it
SELECTOR_FILE = f"{SELECTOR}/model.safetensors"  # in a head's folder
FLOATS = frozenset({"F8_E4M3", "BF16", "F16", "F32", "F64"})
INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U8"})


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What a head has to fit of its target."""

    hidden_size: int
    vocab_size: int  # rows of the embeddings and of the output matrix
    layers: int


def plain_name(name: str) -> str:
    """A tensor's name as `DraftHead` has it: EAGLE-3's first release calls its only layer
    `midlayer` (vLLM: hf_to_vllm_mapper)."""
    return name.replace("midlayer.", "layers.0.")


def expected_tensors(
    config: HeadConfig, *, own_embeddings: bool, own_lm_head: bool
) -> dict[str, Shape]:
    """Tensor -> shape of a `DraftHead`, under the names of its state_dict."""
    size, width, heads = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * heads, config.num_key_value_heads * heads
    taps = len(config.eagle_aux_hidden_state_layer_ids)
    shapes: dict[str, Shape] = {"fc.weight": (size, config.taps_size), "norm.weight": (size,)}
    if own_embeddings:
        shapes["embed_tokens.weight"] = (config.vocab_size, size)
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(taps)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.taps_size,)
    if config.method == "p-eagle":
        shapes["mask_hidden"] = (1, config.taps_size)
    for layer in range(config.num_hidden_layers):
        inputs = 2 * size if layer == 0 else size
        parts = {
            "input_layernorm.weight": (size,),
            "post_attention_layernorm.weight": (size,),
            "self_attn.q_proj.weight": (queries, inputs),
            "self_attn.k_proj.weight": (keys, inputs),
            "self_attn.v_proj.weight": (keys, inputs),
            "self_attn.o_proj.weight": (size, queries),
            "mlp.gate_proj.weight": (width, size),
            "mlp.up_proj.weight": (width, size),
            "mlp.down_proj.weight": (size, width),
        }
        if layer == 0:
            parts["hidden_norm.weight"] = (size,)
        if config.qk_norm:
            parts |= {"self_attn.q_norm.weight": (heads,), "self_attn.k_norm.weight": (heads,)}
        if config.attention_bias:
            parts |= {"self_attn.q_proj.bias": (queries,)}
            parts |= {f"self_attn.{name}.bias": (keys,) for name in ("k_proj", "v_proj")}
            if not config.qk_norm:
                parts["self_attn.o_proj.bias"] = (size,)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    drafts = config.draft_vocab_size
    if own_lm_head or drafts:
        shapes["lm_head.weight"] = (drafts or config.vocab_size, size)
    if drafts:
        shapes |= {"d2t": (drafts,), "t2d": (config.vocab_size,)}
    return shapes | _selector_tensors(config)


def _selector_tensors(config: HeadConfig) -> dict[str, Shape]:
    """Tensor -> shape of a head's path selector (`drafters.model.selector.PathSelector`)."""
    selector, size = config.path_selector, config.hidden_size
    if selector is None:
        return {}
    width = 2 * selector.rank
    shapes: dict[str, Shape] = {
        "state.weight": (width, size),
        "state.bias": (width,),
        "before.weight": (width, config.target_hidden_size),
        "candidate.weight": (selector.rank, config.target_hidden_size),
        "norm.weight": (size,),
    }
    return {f"{SELECTOR}.{name}": shape for name, shape in shapes.items()}


def tensor_problems(config: HeadConfig, stored: Mapping[str, StoredTensor]) -> list[str]:
    """What a head's tensors lack or have wrong, by name, type and shape; empty if nothing."""
    found = {plain_name(name): tensor for name, tensor in stored.items()}
    found = {name: tensor for name, tensor in found.items() if not name.endswith(UNUSED)}
    expected = expected_tensors(
        config,
        own_embeddings="embed_tokens.weight" in found,
        own_lm_head="lm_head.weight" in found,
    )
    # vLLM needs no t2d, and some heads have none. With a full vocabulary both maps are idle.
    optional = {"t2d"} if "d2t" in found else set()
    idle = set() if config.draft_vocab_size else set(MAPS)
    problems = []
    if missing := sorted(set(expected) - set(found) - optional):
        problems.append(f"lacks {', '.join(missing)}{_why(config, missing)}")
    if unknown := sorted(set(found) - set(expected) - idle):
        problems.append(f"has unknown {', '.join(unknown)}{_why_unknown(config, unknown)}")
    for name, shape in sorted(expected.items()):
        tensor = found.get(name)
        if tensor is None:
            continue
        if not _fits(name, tensor.shape, shape):
            problems.append(f"{name} has the shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.dtype not in _types(name):
            problems.append(f"{name} has the type {tensor.dtype}")
    return problems


def _why(config: HeadConfig, missing: list[str]) -> str:
    if "lm_head.weight" in missing:
        return (
            f" (a draft vocabulary of {config.draft_vocab_size} needs an output matrix of its own)"
        )
    if "mask_hidden" in missing:
        return " (it drafts in parallel by mask_hidden)"
    if missing[0].startswith(f"{SELECTOR}."):
        return f" (config.json has path_selector, whose tensors are in {SELECTOR}/)"
    return ""


def _why_unknown(config: HeadConfig, unknown: list[str]) -> str:
    if "mask_hidden" in unknown:
        return " (P-EAGLE heads have mask_hidden, and ptd_token_id in config.json)"
    if config.path_selector is None and unknown[-1].startswith(f"{SELECTOR}."):
        return f" ({SELECTOR}/ belongs to path_selector, which config.json lacks)"
    return ""


def _fits(name: str, found: Shape, expected: Shape) -> bool:
    if name == "mask_hidden":  # the speculators library keeps a batch dimension
        return math.prod(found) == math.prod(expected)
    return found == expected


def _types(name: str) -> frozenset[str]:
    if name not in MAPS:
        return FLOATS
    return INTEGERS | {"BOOL"} if name == "t2d" else INTEGERS


def target_problems(config: HeadConfig, target: TargetSizes, own: frozenset[str]) -> list[str]:
    """Why a head cannot draft for a target. `own` are the head's tensors: what it has not of
    embeddings and output matrix, it borrows from the target."""
    problems = []
    if config.target_hidden_size != target.hidden_size:
        problems.append(
            f"reads hidden size {config.target_hidden_size}, the target has "
            f"{target.hidden_size}: it was made for another model"
        )
    if config.vocab_size != target.vocab_size:
        problems.append(
            f"vocabulary {config.vocab_size}, the target has {target.vocab_size}: its drafts "
            "would be other tokens"
        )
    problems += [
        f"taps layer {tap}, the target has {target.layers}"
        for tap in config.eagle_aux_hidden_state_layer_ids
        if tap > target.layers
    ]
    borrowed = {"embed_tokens.weight", "lm_head.weight"} - own
    if borrowed and own and config.hidden_size != target.hidden_size:
        problems.append(
            f"borrows {' and '.join(sorted(borrowed))} of width {target.hidden_size} from the "
            f"target, its own width is {config.hidden_size}"
        )
    return problems
