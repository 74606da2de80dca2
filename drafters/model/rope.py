"""Rotary embeddings, plain and scaled, as vLLM computes them
(model_executor/layers/rotary_embedding)."""

from __future__ import annotations

import math
from functools import cache

import torch

from drafters.model.rope_scaling import RopeScaling


def rotate(
    x: torch.Tensor,  # [batch, heads, n, size]
    positions: torch.Tensor,  # [batch, n]
    theta: float,
    scaling: RopeScaling | None = None,
) -> torch.Tensor:
    """Rotate queries or keys by their positions; pairs are (i, i + size / 2), as in Llama."""
    rates = _rates(x.shape[-1] // 2, theta, scaling, x.device)
    size = magnitude(scaling)
    angles = positions[:, None, :, None].float() * rates  # [batch, 1, n, half]
    cos, sin = (angles.cos() * size).to(x.dtype), (angles.sin() * size).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def magnitude(scaling: RopeScaling | None) -> float:
    """The factor by which YaRN multiplies queries and keys; 1 for other types."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@cache
def _rates(
    half: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> torch.Tensor:
    """Radians per position of each pair, float32 `[half]`."""
    with torch.inference_mode(False):  # cached results are used where gradients are taken, too
        rates = theta ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
        if scaling is None:
            return rates
        if scaling.rope_type == "linear":
            return rates / scaling.factor
        if scaling.rope_type == "llama3":
            return _llama3(rates, scaling)
        return _yarn(rates, theta, scaling)


def _llama3(rates: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3: slow pairs are divided by `factor`, fast ones are not, those between in part."""
    turns = scaling.original_max_position_embeddings * rates / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fast = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns > low).float()
    return rates * fast + rates / scaling.factor * (1 - fast)


def _yarn(rates: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): pairs of fewer turns than `beta_slow` in the original length are
    divided by `factor`, those of more than `beta_fast` are not, those between in part."""
    half = len(rates)

    def pair_of(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    pairs = torch.arange(half, dtype=torch.float32, device=rates.device)
    slow = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return rates / scaling.factor * slow + rates * (1 - slow)
