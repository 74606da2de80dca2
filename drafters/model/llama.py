"""A Llama target as a plain module: taps, cache and explicit masks.

Pretraining uses transformers' definition of the same architecture; this one reads the same
checkpoint and exists for what that one does not offer in one pass: the taps of chosen layers
only, and a cache that can be cut back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from drafters.model.cache import KeyValueCache
from drafters.model.layers import MLP, Attention, RMSNorm


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The fields of a Llama config.json that shape its computation."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    @classmethod
    def load(cls, folder: Path) -> Self:
        document = json.loads((folder / "config.json").read_text())
        if not document["tie_word_embeddings"]:
            raise ValueError("only targets with tied embeddings are supported")
        rope = document["rope_parameters"]
        if rope["rope_type"] != "default":
            raise ValueError(f"unsupported rope_type {rope['rope_type']!r}")
        names = set(cls.__dataclass_fields__) - {"rope_theta"}
        return cls(rope_theta=rope["rope_theta"], **{name: document[name] for name in names})


class LlamaLayer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(
            size,
            size,
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
            shape.rope_theta,
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, shape.intermediate_size)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        allowed: torch.Tensor,
        cache: KeyValueCache | None,
        layer: int,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, allowed, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The frozen target of a draft head."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        tokens: torch.Tensor,  # [batch, n]
        positions: torch.Tensor,  # [batch, n]
        allowed: torch.Tensor,  # bool [batch or 1, n, past + n]
        taps: Sequence[int] = (),  # tap i is the residual stream after i layers
        cache: KeyValueCache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Final hidden states [batch, n, hidden] and the taps [batch, n, taps * hidden]."""
        x = self.embed_tokens(tokens)
        taken = [x] if 0 in taps else []
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, allowed, cache, index)
            if index + 1 in taps:
                taken.append(x)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.norm(x), torch.cat(taken, dim=-1) if taken else None

    @property
    def lm_head(self) -> nn.Parameter:
        """The output matrix [vocabulary, hidden], tied to the embeddings."""
        return self.embed_tokens.weight

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.lm_head)

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        shape = self.shape
        return KeyValueCache(
            shape.num_hidden_layers,
            batch,
            shape.num_key_value_heads,
            capacity,
            shape.head_dim,
            self.lm_head.dtype,
        )


def load_llama(folder: Path, dtype: torch.dtype | None = None) -> Llama:
    """Read a checkpoint written by transformers."""
    weights = {
        name.removeprefix("model."): value
        for name, value in load_file(folder / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    model = Llama(LlamaShape.load(folder)).to(dtype or weights["norm.weight"].dtype)
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)
