"""The table `about` of a preset: what is known before anything is downloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from app.errors import SettingsError
from app.settings import Section, Settings, of_preset, preset_names, read_preset
from drafters.model.config import Method


class KvLayers(Section):
    """Layers whose KV cache has one shape."""

    layers: int = Field(ge=1)
    heads: int = Field(ge=1)  # key-value heads
    head_dim: int = Field(ge=1)
    window: int | None = Field(None, ge=1)  # tokens that a sliding layer keeps; None: all


class TargetFacts(Section):
    """Facts about a target, for the estimate of memory."""

    parameters_b: float = Field(gt=0)  # billions, embeddings included
    weights_gib: float | None = Field(None, gt=0)  # as stored, where that is no plain dtype
    hidden_size: int = Field(ge=1)
    max_length: int = Field(ge=1)
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
    serves it; None if there is none.

    The facts about the head are taken to hold for every head of that target.
    """
    for name in [preset] if preset else preset_names():
        if of_preset(name).model.model == settings.model.model:
            return about_preset(name)
    return None


def facts_in(config: Mapping[str, Any], weights_bytes: int) -> TargetFacts | None:
    """Facts about a target, from the text part of its config.json and the bytes of its weights.

    None for a kind of configuration that this function does not know.
    """
    try:
        layers: int = config["num_hidden_layers"]
        query_heads: int = config["num_attention_heads"]
        heads: int = config.get("num_key_value_heads") or query_heads
        head_dim: int = config.get("head_dim") or config["hidden_size"] // query_heads
        kinds = Counter(config.get("layer_types") or ["full_attention"] * layers)
        kv = []
        if full := kinds["full_attention"]:
            kv.append(
                KvLayers(
                    layers=full,
                    # Gemma 4's full layers have fewer and wider heads.
                    heads=config.get("num_global_key_value_heads") or heads,
                    head_dim=config.get("global_head_dim") or head_dim,
                )
            )
        if sliding := kinds["sliding_attention"]:
            window = config["sliding_window"]
            kv.append(KvLayers(layers=sliding, heads=heads, head_dim=head_dim, window=window))
        return TargetFacts(
            parameters_b=weights_bytes / 2e9,
            weights_gib=weights_bytes / 1024**3,
            hidden_size=config["hidden_size"],
            max_length=config["max_position_embeddings"],
            kv=tuple(kv),
        )
    except (KeyError, TypeError, ValidationError):
        return None


def _parse(name: str, table: Mapping[str, Any]) -> About:
    try:
        return About.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("about", *first["loc"]))
        raise SettingsError(key, f"{first['msg']} (from preset {name})") from None
