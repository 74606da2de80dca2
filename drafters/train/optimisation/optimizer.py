"""Muon for the matrices and AdamW for all other weights, over fp32 masters of a bf16 model.

Muon multiplies in the model's type: `aerie train` picks the one that is faster on the machine.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from drafters.train.optimisation.muon import Muon


class MixedOptimizer:
    """Updates fp32 copies and writes them back to the working model.

    A bf16 weight has 8 bits of mantissa: updates below 1/256 of a weight would vanish.
    """

    def __init__(
        self, model: nn.Module, *, muon_lr: float, adam_lr: float, weight_decay: float = 0.0
    ) -> None:
        self._working: list[nn.Parameter] = []
        self._master: list[nn.Parameter] = []
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            master = nn.Parameter(parameter.detach().float().clone())
            self._working.append(parameter)
            self._master.append(master)
            # Rows of a table are independent: orthogonalising their updates makes no sense.
            table = "embed" in name or "lm_head" in name or "mask_hidden" in name
            table = table or name.startswith("selector.")  # whose rows belong to token pairs
            (others if parameter.ndim != 2 or table else matrices).append(master)
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        ]
        if matrices:
            self._optimizers.append(
                Muon(matrices, lr=muon_lr, weight_decay=weight_decay, dtype=self._working[0].dtype)
            )
        self._base = [group["lr"] for opt in self._optimizers for group in opt.param_groups]

    def step(self, scale: float, clip: float = 1.0) -> float:
        """Update at `scale` times the base rates if the gradient is finite; returns its norm."""
        for working, master in zip(self._working, self._master, strict=True):
            # Some tensors get no gradient from a batch, such as EAGLE-3's without any draft.
            grad = torch.zeros_like(working) if working.grad is None else working.grad
            master.grad = grad.float()
            working.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(self._master, clip))
        if not math.isfinite(norm):
            return norm
        groups = [group for opt in self._optimizers for group in opt.param_groups]
        for group, base in zip(groups, self._base, strict=True):
            group["lr"] = base * scale
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            for working, master in zip(self._working, self._master, strict=True):
                working.copy_(master)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The fp32 masters and the moments, for `load_state_dict` of a resumed run."""
        return {
            "masters": [master.detach() for master in self._master],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict()` of an equal model; sets the model's weights too."""
        for working, master, saved in zip(
            self._working, self._master, state["masters"], strict=True
        ):
            master.copy_(saved)
            working.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def trapezoid(progress: float, warmup: float = 0.02, decay: float = 0.5) -> float:
    """Factor of the learning rate at `progress`, 0 to 1: it rises, holds, and falls linearly to
    zero over the last `decay` of the run."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    return min(1.0, max(0.0, (1.0 - progress) / decay))
