"""What a head's config.json says, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a P-EAGLE head, under the key names that vLLM reads.

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
    ptd_token_id: int  # the placeholder token of the parallel slots
    eagle_aux_hidden_state_layer_ids: tuple[int, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    fc_norm: bool = True  # one RMSNorm per tap before `fc`

    def __post_init__(self) -> None:
        taps = self.eagle_aux_hidden_state_layer_ids
        if list(taps) != sorted(set(taps)) or not taps:
            raise ValueError(f"taps must be ascending and distinct, got {taps}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if not 0 <= self.ptd_token_id < self.vocab_size:
            raise ValueError(f"ptd_token_id {self.ptd_token_id} is outside the vocabulary")

    @property
    def taps_size(self) -> int:
        """Width of the concatenated taps, the input of `fc`."""
        return len(self.eagle_aux_hidden_state_layer_ids) * self.target_hidden_size

    def to_json(self, dtype: str) -> dict[str, object]:
        """The config.json of a checkpoint; `llama` is the family of the head's layers."""
        document = asdict(self)
        theta = document.pop("rope_theta")
        taps = list(document.pop("eagle_aux_hidden_state_layer_ids"))
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **document,
            "draft_vocab_size": self.vocab_size,
            "eagle_aux_hidden_state_layer_ids": taps,
            "norm_before_residual": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> HeadConfig:
        names = {field.name for field in fields(cls)}
        values = {name: value for name, value in document.items() if name in names}
        taps = values["eagle_aux_hidden_state_layer_ids"]
        rope = document.get("rope_parameters")
        if not isinstance(taps, list) or not isinstance(rope, dict):
            raise ValueError(
                "config.json lacks eagle_aux_hidden_state_layer_ids or rope_parameters"
            )
        if document.get("norm_before_residual", False):
            raise ValueError("norm_before_residual heads are not supported")
        values["eagle_aux_hidden_state_layer_ids"] = tuple(taps)
        values["rope_theta"] = rope["rope_theta"]
        values.setdefault("fc_norm", False)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def load(cls, folder: Path) -> HeadConfig:
        return cls.from_json(json.loads((folder / "config.json").read_text()))
