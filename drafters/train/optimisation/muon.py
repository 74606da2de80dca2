"""The Muon optimizer, with a choice of data type for its matrix products.

K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). torch.optim.Muon always
orthogonalises in bfloat16, which a CPU without units for it emulates: with AVX2 alone that was 86%
of a training step, and float32 made the step eleven times as fast (docs/train-options.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic whose slope at zero is steepest (Jordan)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is replaced by the nearest matrix with orthogonal rows.

    For matrices only. `lr` is the spectral norm of an update of a wide matrix, sqrt(rows / columns)
    times that of a tall one. `dtype` is the type of the matrix products, not of the state.
    Equals torch.optim.Muon with `adjust_lr_fn="original"` when `dtype` is bfloat16.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.ndim != 2:
                    raise ValueError(f"Muon updates matrices, got shape {tuple(matrix.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                average = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
                update = orthogonalised(matrix.grad.lerp(average, momentum), self._dtype)
                rows, columns = matrix.shape
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * math.sqrt(max(1.0, rows / columns)))


def orthogonalised(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """About U V^T for `matrix` [rows, columns] = U S V^T: singular values between 0.7 and 1.2.

    Five Newton-Schulz iterations, their products in `dtype`.
    """
    linear, cubic, quintic = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.T if tall else x
