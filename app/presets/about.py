"""The table `about` of a preset: what is known before anything is downloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from app.errors import SettingsError
from app.settings import Section, Settings, of_preset, preset_names, read_preset
from drafters.model.config import Method

# Bytes of a value, by the names of types. vLLM's "auto" loads weights of float32 in two bytes, too.
BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}

# Keys of config.json that say how many experts a layer has (vllm/transformers_utils/
# model_arch_config_convertor.py).
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
# Types of layers that keep the keys and values of all tokens, a name of transformers' each
# (transformers/configuration_utils.py, and _ATTENTION_LAYER_TYPES in vllm/config/model.py). Llama
# 4's chunked ones do, too: vLLM allocates them like full ones unless it is told to do otherwise
# (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE), and always beside a head.
_FULL_ATTENTION = (
    *("full_attention", "attention", "hybrid", "chunked_attention"),
    *("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"),
)
# Kinds of RoPE scaling whose factor is in the model's length already.
_SCALED_ALREADY = frozenset(
    ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
)


class KvLayers(Section):
    """Layers whose KV cache has one shape."""

    layers: int = Field(ge=1)
    heads: int = Field(ge=1)  # key-value heads
    head_dim: int = Field(ge=1)
    latent: bool = False  # MLA: one vector for keys and values of all heads, whole on each GPU
    window: int | None = Field(None, ge=1)  # tokens that a sliding layer keeps; None: all


class TargetFacts(Section):
    """Facts about a target, for the estimate of memory."""

    parameters_b: float = Field(gt=0)  # billions, embeddings included
    weights_gib: float | None = Field(None, gt=0)  # as stored, where that is no plain dtype
    hidden_size: int = Field(ge=1)
    max_length: int = Field(ge=1)
    mixture: bool = False  # of experts
    layers: int | None = Field(None, ge=1)  # all layers, where some keep no keys and values
    recurrent: bool = False  # whether some may keep states instead, which are not estimated
    kv: tuple[KvLayers, ...]


class HeadFacts(Section):
    """Facts about a head, for the estimate of memory; its weights count two bytes each."""

    method: Method = "p-eagle"  # how it drafts; the head's own config.json decides
    parameters_b: float = Field(gt=0)
    layers: int = Field(ge=1)
    taps: int = Field(3, ge=1)  # hidden states of the target that it reads of each token


class About(Section):
    """What a preset says of its pair beside the settings."""

    serve_k: tuple[int, int] | None = None  # the range of K worth serving with
    trained_k: int | None = None  # how many positions the head was trained for
    notes: tuple[str, ...] = ()
    target: TargetFacts | None = None
    head: HeadFacts | None = None


def about_preset(name: str) -> About:
    """The table `about` of a preset. Raises SettingsError if it is malformed."""
    return _parse(name, read_preset(name)[1])


def facts_for(settings: Settings, preset: str | None = None) -> About | None:
    """Facts about the target that `settings` name, from `preset`, or else from any preset that
    serves it, with the same head if there is one; None if there is none.

    The facts about the head are taken to hold for every other head of that target.
    """
    target, head = settings.model.model, settings.speculation.drafter
    presets = {name: of_preset(name) for name in ([preset] if preset else preset_names())}
    names = [name for name, known in presets.items() if known.model.model == target]
    same_head = [name for name in names if presets[name].speculation.drafter == head]
    return about_preset((same_head or names)[0]) if names else None


def facts_in(config: Mapping[str, Any], weights_bytes: int) -> TargetFacts | None:
    """Facts about a target, from the text part of its config.json and the bytes of its weights.

    None for a kind of configuration that this function does not know. Of weights that are stored
    quantised the bytes count, of others the parameters: they are loaded in a type of their own.
    """
    try:
        layers: int = config["num_hidden_layers"]
        query_heads: int = config["num_attention_heads"]
        heads: int = config.get("num_key_value_heads") or query_heads
        head_dim: int = (
            config.get("head_dim")
            or config.get("attention_head_dim")
            or config["hidden_size"] // query_heads
        )
        full, sliding = _attention_layers(config, layers)
        kv = []
        if rank := config.get("kv_lora_rank"):
            size = rank + config["qk_rope_head_dim"]
            kv.append(KvLayers(layers=full or layers, heads=1, head_dim=size, latent=True))
        elif full:
            kv.append(
                KvLayers(
                    layers=full,
                    # Gemma 4's full layers have fewer and wider heads.
                    heads=config.get("num_global_key_value_heads") or heads,
                    head_dim=config.get("global_head_dim") or head_dim,
                )
            )
        if sliding:
            window = config["sliding_window"]
            kv.append(KvLayers(layers=sliding, heads=heads, head_dim=head_dim, window=window))
        stored = BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
        quantised = "quantization_config" in config
        return TargetFacts(
            parameters_b=weights_bytes / stored / 1e9,
            weights_gib=weights_bytes / 1024**3 if quantised else None,
            hidden_size=config["hidden_size"],
            max_length=longest_of(config) or 0,  # without one, nothing can be said
            mixture=any(map(config.get, _EXPERTS)),
            layers=layers,
            recurrent=full + sliding < layers,
            kv=tuple(kv),
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValidationError):
        return None


def longest_of(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that vLLM takes a model for, from the text part of its config.json; None
    if that does not say (vllm/config/model.py, `_get_and_verify_max_len`)."""
    length = config.get("model_max_length") or config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(length, int) or not isinstance(scaling, Mapping):
        return length if isinstance(length, int) else None
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    stretches = kind not in _SCALED_ALREADY and "gemma3" not in str(config.get("model_type"))
    return int(length * factor) if stretches and isinstance(factor, int | float) else length


def _attention_layers(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """How many layers keep the keys and values of all tokens, and how many those of a window.

    In a hybrid model others are recurrent, or have no attention. Where the configuration tells no
    layers apart, all of them keep everything.
    """
    if types := config.get("layer_types") or config.get("layers_block_type"):
        kinds = Counter(types)
        return sum(kinds[kind] for kind in _FULL_ATTENTION), kinds["sliding_attention"]
    full = layers
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        full = Counter(pattern)["*"]
    elif period := config.get("attn_layer_period"):  # Jamba
        full = len(range(config["attn_layer_offset"], layers, period))
    elif indices := config.get("full_attn_idxs"):  # LFM2
        full = len(indices)
    elif linear := config.get("linear_attn_config"):  # Kimi Linear
        full = layers - len(linear.get("kda_layers") or ())
    elif interval := config.get("full_attention_interval"):  # Qwen3-Next: the last of so many
        full = layers // interval
    elif group := config.get("layer_group_size"):  # Ling: the last of so many, and those left over
        full = layers // group + layers % group
    return full, 0


def _parse(name: str, table: Mapping[str, Any]) -> About:
    try:
        return About.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("about", *first["loc"]))
        raise SettingsError(key, f"{first['msg']} (from preset {name})") from None
