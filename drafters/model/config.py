"""What a head's config.json says, checked.

Two layouts are read: the flat one of EAGLE-3 checkpoints that vLLM serves as it is, and that of
the speculators library, which vLLM translates when it loads (vllm/transformers_utils/configs/
speculators/algos.py). Written is the flat one; `drafters.model.speculators` writes the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

Method = Literal["p-eagle", "eagle3"]

_TAPS = "eagle_aux_hidden_state_layer_ids"
# Keys that change what vLLM computes, and the only value of each that `DraftHead` computes.
_PLAIN = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
}


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
    # The placeholder token of the parallel slots; None: EAGLE-3, which drafts one by one.
    ptd_token_id: int | None = None
    draft_vocab_size: int | None = None  # None: the target's vocabulary
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    fc_norm: bool = False  # one RMSNorm per tap before `fc`
    norm_before_fc: bool = False  # one RMSNorm over all taps before `fc`
    norm_before_residual: bool = False  # the residual starts behind `hidden_norm`
    norm_output: bool = False  # EAGLE-3 carries the normed state to its next pass
    attention_bias: bool = False

    def __post_init__(self) -> None:
        taps = self.eagle_aux_hidden_state_layer_ids
        if list(taps) != sorted(set(taps)) or not taps:
            raise ValueError(f"taps must be ascending and distinct, got {taps}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.ptd_token_id is not None and not 0 <= self.ptd_token_id < self.vocab_size:
            raise ValueError(f"ptd_token_id {self.ptd_token_id} is outside the vocabulary")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is no part of {self.vocab_size}"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other")

    @property
    def method(self) -> Method:
        return "eagle3" if self.ptd_token_id is None else "p-eagle"

    @property
    def taps_size(self) -> int:
        """Width of the concatenated taps, the input of `fc`."""
        return len(self.eagle_aux_hidden_state_layer_ids) * self.target_hidden_size

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The config.json of a checkpoint; `llama` is the family of the head's layers."""
        document = asdict(self)
        theta = document.pop("rope_theta")
        taps = list(document.pop("eagle_aux_hidden_state_layer_ids"))
        if self.ptd_token_id is None:
            document.pop("ptd_token_id")
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **document,
            "draft_vocab_size": self.draft_vocab_size or self.vocab_size,
            "eagle_aux_hidden_state_layer_ids": taps,
            # vLLM takes the number of taps from here or supposes three.
            "num_aux_hidden_states": len(taps),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> HeadConfig:
        """Read either layout; raises ValueError for what `DraftHead` does not compute."""
        if "speculators_model_type" in document:
            document = _flat(document)
        nested = document.get("eagle_config") or {}  # where older checkpoints keep some keys
        _refuse_unknown_mathematics(document, nested)
        names = {field.name for field in fields(cls)}
        values = {k: v for k, v in document.items() if k in names and v is not None}
        taps = values.get(_TAPS) or nested.get(_TAPS)
        if not isinstance(taps, list):
            raise ValueError(f"config.json lacks {_TAPS}")
        values[_TAPS] = tuple(taps)
        for name in ("pard_token", "mask_token_id"):  # other names vLLM reads it by, weakest first
            if document.get(name) is not None:
                values["ptd_token_id"] = document[name]
        if "norm_before_fc" in nested:
            values["norm_before_fc"] = nested["norm_before_fc"]
        rope = document.get("rope_parameters") or {}
        values["rope_theta"] = rope.get("rope_theta", document.get("rope_theta", 10000.0))
        # What a Llama configuration of transformers means by a missing key.
        values.setdefault("rms_norm_eps", 1e-6)
        values.setdefault("max_position_embeddings", 2048)
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
        values.setdefault("target_hidden_size", values["hidden_size"])
        if values.get("draft_vocab_size") == values["vocab_size"]:
            del values["draft_vocab_size"]
        return cls(**values)

    @classmethod
    def load(cls, folder: Path) -> HeadConfig:
        return cls.from_json(json.loads((folder / "config.json").read_text()))


def _refuse_unknown_mathematics(document: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    for key, plain in _PLAIN.items():
        if document.get(key) not in (None, plain):
            raise ValueError(f"{key} {document[key]!r} is not supported")
    if "sliding_attention" in (document.get("layer_types") or ()):
        raise ValueError("layer_types with sliding_attention are not supported")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError("use_aux_hidden_state false is not supported")
    for key in ("rope_parameters", "rope_scaling"):
        rope = document.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope_type {kind!r} is not supported")


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """The speculators library's layout in the flat one's keys, as vLLM 0.32 understands it."""
    kind = document["speculators_model_type"]
    if kind not in ("eagle3", "peagle"):
        raise ValueError(f"speculators_model_type {kind!r} is neither eagle3 nor peagle")
    layers = document["transformer_layer_config"]
    if layers.get("model_type", "llama") != "llama":
        raise ValueError(f"layers of model_type {layers['model_type']!r} are not supported")
    flat = {**layers, **{k: v for k, v in document.items() if v is not None}}
    # The library always writes this key; its absence has a meaning in vLLM only.
    flat["norm_before_residual"] = document.get("norm_before_residual", kind == "eagle3")
    if kind == "eagle3":
        flat.pop("mask_token_id", None)
    elif flat.get("mask_token_id") is None:
        raise ValueError("a peagle config.json needs mask_token_id")
    return flat
