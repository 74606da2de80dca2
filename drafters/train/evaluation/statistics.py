"""Confidence intervals by resampling whole requests."""

from __future__ import annotations

import torch

from drafters.small_samples import CONFIDENCE, widening

RESAMPLES = 4000


def draw_weights(requests: int, seed: int, resamples: int = RESAMPLES) -> torch.Tensor:
    """How often each of `requests` occurs in each resample: float64 [resamples, requests]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(requests, (resamples, requests), generator=generator)
    weights = torch.zeros(resamples, requests, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones_like(weights))


def ratio_intervals(
    numerators: torch.Tensor,  # [requests, ratios]
    denominators: torch.Tensor,  # [requests]: positive
    weights: torch.Tensor,  # [resamples, requests]
    confidence: float = CONFIDENCE,
) -> torch.Tensor:
    """Percentile intervals of `numerators.sum(0) / denominators.sum()`: float64 [ratios, 2].

    The steps of a request resemble each other, so that requests and not steps are resampled
    (cluster bootstrap). With few requests the percentiles are too near to each other: they are
    moved away from the ratio by `widening`, which matters below thirty requests. Raises ValueError
    for fewer than two.
    """
    requests = len(denominators)
    if requests < 2:
        raise ValueError("an interval needs two requests or more")
    upper, lower = numerators.double(), denominators.double()
    ratios = (weights @ upper) / (weights @ lower)[:, None]
    tail = (1.0 - confidence) / 2.0
    ends = torch.quantile(ratios, torch.tensor([tail, 1.0 - tail], dtype=torch.float64), dim=0)
    centre = upper.sum(0) / lower.sum()
    return (centre + (ends - centre) * widening(requests, confidence)).T
