"""Losses computed a slice of the tokens at a time, so that logits never exist in full."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_CHUNK = 2048  # tokens; 8,192 logits each in fp32 are 64 MiB


def cross_entropy_backward(
    hidden: torch.Tensor,  # [tokens, hidden]
    weight: nn.Parameter,  # [vocabulary, hidden]
    labels: torch.Tensor,  # [tokens]
) -> torch.Tensor:
    """Mean cross-entropy; runs its backward pass and leaves gradients on everything behind it."""
    leaf = hidden.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float32)
    for start in range(0, len(labels), _CHUNK):
        part = slice(start, start + _CHUNK)
        logits = functional.linear(leaf[part], weight).float()
        loss = functional.cross_entropy(logits, labels[part], reduction="sum") / len(labels)
        loss.backward()
        total += loss.detach()
    assert leaf.grad is not None
    hidden.backward(leaf.grad)
    return total


def head_loss_backward(
    hidden: torch.Tensor,  # [rows, elements, hidden]
    weight: torch.Tensor,  # [vocabulary, hidden]: the target's, frozen
    labels: torch.Tensor,  # [rows, elements]; negative ones do not count
    depths: torch.Tensor,  # [elements]
    k_train: int,
) -> torch.Tensor:
    """Cross-entropy of a head's elements, averaged over all of them; runs the backward pass.

    COD has already thinned the deep slots, which is their weight (paper, section 3.1).
    Returns each depth's own mean: [k_train].
    """
    counted = labels >= 0
    leaf = hidden[counted].detach().requires_grad_()  # [counted, hidden]
    kinds, wanted = depths.expand_as(labels)[counted], labels[counted]
    sums, counts = torch.zeros(k_train), torch.bincount(kinds, minlength=k_train)
    for start in range(0, len(wanted), _CHUNK):
        part = slice(start, start + _CHUNK)
        logits = functional.linear(leaf[part], weight).float()
        losses = functional.cross_entropy(logits, wanted[part], reduction="none")
        (losses.sum() / len(wanted)).backward()
        sums.index_add_(0, kinds[part], losses.detach())
    assert leaf.grad is not None
    gradient = torch.zeros_like(hidden)
    gradient[counted] = leaf.grad
    hidden.backward(gradient)
    return sums / counts.clamp(min=1)
