"""The Llama and Qwen3 building blocks that draft heads are made of.

Attributes are named as in the checkpoint: vLLM loads a module's state_dict.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from drafters.model.config import HeadConfig
from drafters.model.rope import rotate


class Store(Protocol):
    """Keys and values of entries that other passes computed, to which a pass adds its own."""

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one layer's new entries; returns all that the pass may attend to, new ones last."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 for inputs of any type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, causal or under an explicit mask."""

    def __init__(self, input_size: int, config: HeadConfig) -> None:
        super().__init__()
        size, heads, key_heads = (
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        bias = config.attention_bias
        self.heads, self.key_heads, self.head_size = heads, key_heads, size
        self.theta, self.scaling = config.rope_theta, config.rope_scaling
        self.q_proj = nn.Linear(input_size, heads * size, bias=bias)
        self.k_proj = nn.Linear(input_size, key_heads * size, bias=bias)
        self.v_proj = nn.Linear(input_size, key_heads * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=bias and not config.qk_norm)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,  # [batch, n, input]
        positions: torch.Tensor,  # [batch, n]
        allowed: torch.Tensor | None,  # bool [batch or 1, n, past + n]; None: causal, no past
        store: Store | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Attend to the entries of the store and to `x` itself."""
        batch, n, _ = x.shape
        query = self.q_proj(x).view(batch, n, self.heads, self.head_size).transpose(1, 2)
        key = self.k_proj(x).view(batch, n, self.key_heads, self.head_size).transpose(1, 2)
        value = self.v_proj(x).view(batch, n, self.key_heads, self.head_size).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = rotate(query, positions, self.theta, self.scaling)
        key = rotate(key, positions, self.theta, self.scaling)
        if store is not None:
            key, value = store.append(layer, key, value)
        mixed = attend(query, key, value, allowed, repeat=x.is_cuda and allowed is not None)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, n, -1))


def attend(
    query: torch.Tensor,  # [batch, heads, n, size]
    key: torch.Tensor,  # [batch, key heads, past + n, size]
    value: torch.Tensor,
    allowed: torch.Tensor | None,  # bool [batch or 1, n, past + n]; None: causal
    *,
    repeat: bool,
) -> torch.Tensor:
    """Grouped-query attention, where `repeat` with a copy of keys and values for each head.

    On CUDA no fused kernel takes both groups and a mask: torch falls back to one that holds all
    scores (transformers.integrations.sdpa_attention has the same rule).
    """
    if repeat:
        groups = query.shape[1] // key.shape[1]
        key, value = (item.repeat_interleave(groups, dim=1) for item in (key, value))
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if allowed is None else allowed[:, None],
        is_causal=allowed is None,
        enable_gqa=not repeat,
    )


class MLP(nn.Module):
    """Gated feed-forward network (SwiGLU)."""

    def __init__(self, size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate, bias=False)
        self.up_proj = nn.Linear(size, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to the last dimension."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
