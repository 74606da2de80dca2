"""Implementations of the way from the head's hidden states to draft tokens."""

from __future__ import annotations

import torch

from bench.kernels.clock import Arm


def head(
    batch: int, k: int, hidden: int, words: int, target: int, dtype: torch.dtype, device: str
) -> dict[str, Arm]:
    """Arms for `batch * k` rows, with `words` tokens in the draft vocabulary of `target`."""
    rows = batch * k
    states = torch.randn(rows, hidden).to(device, dtype)
    weight = torch.randn(words, hidden, device=device, dtype=dtype)
    offsets = None
    if target != words:
        kept = torch.randperm(target)[:words].sort().values
        offsets = (kept - torch.arange(words)).to(device)

    def stock() -> torch.Tensor:  # llama_eagle3.py, compute_logits, and argmax
        logits = torch.nn.functional.linear(states, weight)
        if offsets is None:
            return logits.argmax(-1)
        every = logits.new_full((rows, target), float("-inf"))
        every[:, torch.arange(words, device=device) + offsets] = logits
        return every.argmax(-1)

    def served() -> torch.Tensor:  # drafters/vllm/v1/drafter.py
        ids = torch.nn.functional.linear(states, weight).argmax(-1)
        return ids if offsets is None else ids + offsets[ids]

    def largest() -> torch.Tensor:  # `max`, which torch vectorises on a CPU, unlike `argmax`
        ids = torch.nn.functional.linear(states, weight).max(-1).indices
        return ids if offsets is None else ids + offsets[ids]

    def blocked(step: int = 4096) -> torch.Tensor:  # only as many logits as a cache holds
        best = torch.full((rows,), float("-inf"), dtype=dtype, device=device)
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        for begin in range(0, words, step):
            top, here = torch.nn.functional.linear(states, weight[begin : begin + step]).max(-1)
            better = top > best
            best, ids = torch.where(better, top, best), torch.where(better, here + begin, ids)
        return ids if offsets is None else ids + offsets[ids]

    assert torch.equal(stock(), served()) and torch.equal(served(), largest())
    size = weight.element_size()
    read, logits = (words + rows) * hidden * size, rows * words * size
    mapped = (2 * rows * target + rows * words) * size if offsets is not None else 0
    return {
        "vllm": Arm(stock, read + 2 * logits + mapped, on_device=True),
        "served": Arm(served, read + 2 * logits, on_device=True),
        "max": Arm(largest, read + 2 * logits, on_device=True),
        "blocked": Arm(blocked, read + 2 * logits, on_device=True),
    }
