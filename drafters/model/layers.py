"""The Llama building blocks that draft heads are made of.

Attribute names are the checkpoint's names: a module's state_dict is what vLLM loads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from drafters.model.cache import Store


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 whatever the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding, halves paired as in Llama.

    x [batch, heads, n, size], positions [batch, n].
    """
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = positions[:, None, :, None].float() * rates  # [batch, 1, n, half]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention, causal or under an explicit mask."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        heads: int,
        key_heads: int,
        head_size: int,
        theta: float,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_size, self.theta = heads, key_heads, head_size, theta
        self.q_proj = nn.Linear(input_size, heads * head_size, bias=bias)
        self.k_proj = nn.Linear(input_size, key_heads * head_size, bias=bias)
        self.v_proj = nn.Linear(input_size, key_heads * head_size, bias=bias)
        self.o_proj = nn.Linear(heads * head_size, hidden_size, bias=bias)

    def forward(
        self,
        x: torch.Tensor,  # [batch, n, input]
        positions: torch.Tensor,  # [batch, n]
        allowed: torch.Tensor | None,  # bool [batch or 1, n, past + n]; None: causal, no past
        cache: Store | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        batch, n, _ = x.shape
        query = self.q_proj(x).view(batch, n, self.heads, self.head_size).transpose(1, 2)
        key = self.k_proj(x).view(batch, n, self.key_heads, self.head_size).transpose(1, 2)
        value = self.v_proj(x).view(batch, n, self.key_heads, self.head_size).transpose(1, 2)
        query, key = rotate(query, positions, self.theta), rotate(key, positions, self.theta)
        if cache is not None:
            key, value = cache.append(layer, key, value)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if allowed is None else allowed[:, None],
            is_causal=allowed is None,
            enable_gqa=True,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, n, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate, bias=False)
        self.up_proj = nn.Linear(size, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
