"""Read and check a head's config.json. Without torch: the gateway does so before it has an engine.

Two layouts are read: the flat one of EAGLE-3 checkpoints that vLLM serves as it is, and that of
the speculators library, which vLLM translates when it loads (vllm/transformers_utils/configs/
speculators/algos.py). This module writes the flat one, `drafters.model.speculators` the other.

`aerie serve`, `aerie evaluate`, `aerie train --init` and `aerie doctor` all refuse what is refused
here, with an error that names the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from drafters.model.rope_scaling import RopeScaling, read_rope

Method = Literal["p-eagle", "eagle3"]
SelectorKind = Literal["gated"]  # of formula; a file names it

_TAPS = "eagle_aux_hidden_state_layer_ids"
_TAPS_COUNT = "num_aux_hidden_states"
_SELECTOR = "path_selector"
_MOST_RANK, _MOST_CANDIDATES = 1024, 64  # a kernel holds a position's scores in its registers
# Keys of the mask token, which fills P-EAGLE's masked positions; the first that is there counts
# (vLLM's _init_parallel_drafting_params).
PLACEHOLDERS = ("mask_token_id", "pard_token", "ptd_token_id")
# Keys that change what vLLM computes, and the only value of each that `DraftHead` computes.
_PLAIN = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "bias": False,
    "is_causal": True,
    "logit_scale": 1.0,
}
# vLLM's classes of flat heads with Llama layers and with Qwen3's (vllm/model_executor/models/
# registry.py). vLLM puts Eagle3 before other names (transformers_utils/configs/eagle.py).
_LLAMA = frozenset({
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM",
})  # fmt: skip
_QWEN3 = "Eagle3Qwen3ForCausalLM"
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """The shape of a P-EAGLE head's path selector (`drafters.model.selector`), under the keys of
    `path_selector` in the head's config.json."""

    rank: int  # of the products that score pairs of tokens
    candidates: int = 16  # the most probable tokens of a position, among which it chooses
    kind: SelectorKind = "gated"

    def __post_init__(self) -> None:
        if self.kind not in get_args(SelectorKind):
            raise ValueError(f"{_SELECTOR}.kind {self.kind!r} is not supported")
        for name, most in (("rank", _MOST_RANK), ("candidates", _MOST_CANDIDATES)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{_SELECTOR}.{name} {value!r} is not from 1 to {most}")

    @classmethod
    def from_json(cls, document: Any) -> SelectorConfig:
        """Read the value of `path_selector`. Raises ValueError, which names the key, for what is
        missing, unknown or not supported."""
        if not isinstance(document, Mapping):
            raise ValueError(f"{_SELECTOR} is not an object: {document!r}")
        if unknown := sorted(set(document) - {field.name for field in fields(cls)}):
            raise ValueError(f"{_SELECTOR}.{unknown[0]} is not supported")
        if missing := [name for name in ("kind", "rank") if name not in document]:
            raise ValueError(f"{_SELECTOR} lacks {', '.join(missing)}")
        return cls(**document)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a draft head, under the key names that vLLM reads.

    Tap i is the residual stream after i layers of the target (the input of layer i);
    i = 0 is the embedding and i = number of layers the stream before the final norm.
    """

    vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    eagle_aux_hidden_state_layer_ids: tuple[int, ...]
    max_position_embeddings: int
    # The mask token of P-EAGLE's masked positions; None: EAGLE-3, which drafts tokens one by one.
    ptd_token_id: int | None = None
    draft_vocab_size: int | None = None  # None: the target's vocabulary
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    fc_norm: bool = False  # one RMSNorm per tap before `fc`
    norm_before_fc: bool = False  # one RMSNorm over all taps before `fc`
    norm_before_residual: bool = False  # the residual starts behind `hidden_norm`
    norm_output: bool = False  # EAGLE-3 carries the normed state to its next pass
    attention_bias: bool = False
    rope_scaling: RopeScaling | None = None  # None: plain rotary embeddings
    # Qwen3's layers: queries and keys are normed head by head, and `o_proj` has no bias.
    qk_norm: bool = False
    # `sliding_attention` or `full_attention` for each layer; always empty where all are full.
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None  # tokens that a sliding layer attends to, itself included
    # Chooses a path through the candidates of P-EAGLE's positions; None: each for itself.
    path_selector: SelectorConfig | None = None

    def __post_init__(self) -> None:
        taps = self.eagle_aux_hidden_state_layer_ids
        if list(taps) != sorted(set(taps)) or not taps or taps[0] < 0:
            raise ValueError(f"{_TAPS} must be ascending and distinct, got {taps}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.ptd_token_id is not None and not 0 <= self.ptd_token_id < self.vocab_size:
            raise ValueError(f"ptd_token_id {self.ptd_token_id} is outside the vocabulary")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is not from 1 to {self.vocab_size - 1}"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} "
                "layers (num_hidden_layers)"
            )
        if unknown := set(self.layer_types) - {SLIDING, FULL}:
            raise ValueError(f"layer_types with {min(unknown)} are not supported")
        if SLIDING in self.layer_types and not (self.sliding_window or 0) > 0:
            raise ValueError(f"layer_types has {SLIDING}, but there is no sliding_window")
        if SLIDING not in self.layer_types:  # one form for one shape: heads are compared by it
            object.__setattr__(self, "layer_types", ())
            object.__setattr__(self, "sliding_window", None)
        if self.path_selector is not None:
            if self.method != "p-eagle":
                raise ValueError(f"{_SELECTOR} is for P-EAGLE heads, and this one is EAGLE-3's")
            drafts = self.draft_vocab_size or self.vocab_size
            if self.path_selector.candidates > drafts:
                raise ValueError(f"{_SELECTOR}.candidates is more than the {drafts} draft tokens")

    @property
    def method(self) -> Method:
        """How the head drafts: EAGLE-3 heads have no mask token."""
        return "eagle3" if self.ptd_token_id is None else "p-eagle"

    @property
    def taps_size(self) -> int:
        """Width of the concatenated taps, the input of `fc`."""
        return len(self.eagle_aux_hidden_state_layer_ids) * self.target_hidden_size

    def window(self, layer: int) -> int | None:
        """Tokens that a layer attends to; None: all."""
        if not self.layer_types or self.layer_types[layer] == FULL:
            return None
        return self.sliding_window

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The config.json of a checkpoint, in the flat layout."""
        document = asdict(self)
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = self.rope_scaling.to_json()
        rope["rope_theta"] = document.pop("rope_theta")
        taps = list(document.pop(_TAPS))
        for name in ("rope_scaling", "qk_norm", "layer_types", "sliding_window", _SELECTOR):
            del document[name]
        if self.ptd_token_id is None:
            document.pop("ptd_token_id")
        if self.layer_types:
            document["layer_types"] = list(self.layer_types)
        if self.sliding_window is not None:
            document["sliding_window"] = self.sliding_window
            if self.qk_norm:  # transformers drops the window of a Qwen3 configuration without it
                document["use_sliding_window"] = True
        if self.path_selector is not None:
            document[_SELECTOR] = asdict(self.path_selector)
        return {
            "architectures": [_QWEN3 if self.qk_norm else "LlamaForCausalLMEagle3"],
            "model_type": "qwen3" if self.qk_norm else "llama",
            **document,
            "draft_vocab_size": self.draft_vocab_size or self.vocab_size,
            _TAPS: taps,
            # Without it vLLM assumes three taps.
            _TAPS_COUNT: len(taps),
            "rope_parameters": rope,
            "hidden_act": "silu",
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], target_layers: int | None = None) -> HeadConfig:
        """Read either layout. `target_layers` is the target's depth, from which vLLM chooses taps
        that the configuration does not name. Raises ValueError, which names the key, for what is
        missing and for what `DraftHead` does not compute."""
        library = "speculators_model_type" in document
        if library:
            document = _flat(document)
        _refuse_wrong_types(document)
        nested = document.get("eagle_config") or {}  # where older checkpoints keep some keys
        _refuse_unknown_mathematics(document, nested)
        qwen3 = _has_qwen3_layers(document, library=library)
        names = {field.name for field in fields(cls)}
        values = {k: v for k, v in document.items() if k in names and v is not None}
        if missing := [name for name in _REQUIRED if name not in values]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        values[_TAPS] = _taps(document, nested, target_layers)
        token = placeholder(document)
        if token is not None:
            values["ptd_token_id"] = token
        if "norm_before_fc" in nested:
            values["norm_before_fc"] = bool(nested["norm_before_fc"])  # null is false in vLLM
        # The defaults of transformers' configurations.
        plain_qwen3 = document.get("model_type") == "qwen3" and not library
        values.setdefault("rms_norm_eps", 1e-6)
        values.setdefault("max_position_embeddings", 32768 if plain_qwen3 else 2048)
        values.setdefault(
            "num_key_value_heads", 32 if plain_qwen3 else values["num_attention_heads"]
        )
        heads = values["num_attention_heads"]
        if document.get("model_type") == "llama" and not library and values["hidden_size"] % heads:
            raise ValueError(
                f"num_attention_heads {heads} does not divide hidden_size {values['hidden_size']}: "
                "vLLM does not read such a config.json"
            )
        values.setdefault("head_dim", 128 if plain_qwen3 else values["hidden_size"] // heads)
        values.setdefault("target_hidden_size", values["hidden_size"])
        if values.get("draft_vocab_size") == values["vocab_size"]:
            del values["draft_vocab_size"]
        values["rope_theta"], values["rope_scaling"] = read_rope(
            document,
            max_positions=values["max_position_embeddings"],
            # vLLM's Qwen3 layers have a default of their own.
            default_theta=1e6 if qwen3 and library else 1e4,
        )
        values["qk_norm"] = qwen3
        values["layer_types"] = _layer_types(document, plain_qwen3=plain_qwen3)
        if _SELECTOR in values:
            values[_SELECTOR] = SelectorConfig.from_json(values[_SELECTOR])
        return cls(**values)

    @classmethod
    def load(cls, folder: Path, target_layers: int | None = None) -> HeadConfig:
        """Read a folder's config.json; see `from_json`."""
        return cls.from_json(json.loads((folder / "config.json").read_text()), target_layers)


_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip


_SIZES = (*_REQUIRED, "num_key_value_heads", "head_dim")
_OBJECTS = ("eagle_config", "rope_parameters", "rope_scaling")
_LISTS = ("architectures", "layer_types")


def _refuse_wrong_types(document: Mapping[str, Any]) -> None:
    for key in _SIZES:
        value = document.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{key} {value!r} is not a whole number of at least 1")
    for kind, name, keys in ((Mapping, "an object", _OBJECTS), (list, "a list", _LISTS)):
        for key in keys:
            if document.get(key) and not isinstance(document[key], kind):
                raise ValueError(f"{key} {document[key]!r} is not {name}")


def placeholder(document: Mapping[str, Any]) -> int | None:
    """The mask token of a flat configuration; None for an EAGLE-3 head, which has none."""
    return next((document[name] for name in PLACEHOLDERS if document.get(name) is not None), None)


def method_of(document: Mapping[str, Any]) -> Method:
    """How a head drafts, by its config.json in either layout, of which nothing else is checked."""
    if "speculators_model_type" in document:
        return "p-eagle" if document["speculators_model_type"] == "peagle" else "eagle3"
    return "eagle3" if placeholder(document) is None else "p-eagle"


def default_taps(target_layers: int) -> tuple[int, int, int]:
    """The taps of a head whose configuration names none, as in vLLM (interfaces.py,
    get_eagle3_default_aux_hidden_state_layers)."""
    return 2, target_layers // 2, target_layers - 3


def _taps(
    document: Mapping[str, Any], nested: Mapping[str, Any], target_layers: int | None
) -> tuple[int, ...]:
    found = document.get(_TAPS) or nested.get(_TAPS)
    if not found:
        if target_layers is None:
            raise ValueError(f"config.json lacks {_TAPS}, and the target's depth is not known")
        found = default_taps(target_layers)
    if not isinstance(found, list | tuple) or not all(isinstance(tap, int) for tap in found):
        raise ValueError(f"{_TAPS} is not a list of layers: {found!r}")
    count = document.get(_TAPS_COUNT)
    if count is not None and count != len(found):
        raise ValueError(f"{_TAPS_COUNT} is {count}, but {_TAPS} names {len(found)} layers")
    return tuple(found)


def _has_qwen3_layers(document: Mapping[str, Any], *, library: bool) -> bool:
    if library:  # vLLM chooses the class by the layers' family
        return bool(document.get("model_type") == "qwen3")
    names = document.get("architectures") or []
    if not names:
        raise ValueError("config.json lacks architectures")
    name = str(names[0])
    if not (name.startswith("Eagle3") or name.endswith("Eagle3")):
        name = f"Eagle3{name}"
    if name == _QWEN3:
        return True
    if name not in _LLAMA:
        raise ValueError(f"architectures {names[0]} is not supported")
    return False


def _layer_types(document: Mapping[str, Any], *, plain_qwen3: bool) -> tuple[str, ...]:
    kinds = document.get("layer_types")
    if plain_qwen3 and not document.get("use_sliding_window"):
        kinds = None
    elif plain_qwen3 and kinds is None:
        full = document.get("max_window_layers", 28)
        count = document["num_hidden_layers"]
        kinds = [FULL if index < full else SLIDING for index in range(count)]
    return tuple(kinds or ())


def _refuse_unknown_mathematics(document: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    for key, plain in _PLAIN.items():
        if document.get(key) not in (None, plain):
            raise ValueError(f"{key} {document[key]!r} is not supported")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError("eagle_config.use_aux_hidden_state false is not supported")


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the speculators library's layout to the flat one's keys, as vLLM 0.32 does."""
    kind = document["speculators_model_type"]
    if kind not in ("eagle3", "peagle"):
        raise ValueError(f"speculators_model_type {kind!r} is neither eagle3 nor peagle")
    layers = document.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError("config.json lacks transformer_layer_config")
    if layers.get("model_type", "llama") not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config.model_type {layers['model_type']!r} is not supported"
        )
    flat = {key: value for key, value in layers.items() if key not in PLACEHOLDERS}
    flat |= {key: document[key] for key in _OUTSIDE if document.get(key) is not None}
    flat.setdefault("model_type", "llama")
    # The library always writes this key; its absence has a meaning in vLLM only.
    flat["norm_before_residual"] = document.get("norm_before_residual", kind == "eagle3")
    if kind == "peagle":
        if document.get("mask_token_id") is None:
            raise ValueError("a peagle config.json needs mask_token_id")
        flat["mask_token_id"] = document["mask_token_id"]
    return flat


# Keys that the library keeps beside `transformer_layer_config`.
_OUTSIDE = (
    "draft_vocab_size",
    "target_hidden_size",
    _TAPS,
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    _SELECTOR,
)
