"""Run a float32 draft head's matrix products in bfloat16, on a CPU where that is faster.

Rounding costs a head next to no acceptance and never a wrong token, since the target verifies each
draft. The target keeps its own type (docs/decisions/0004).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

from drafters.vllm.cpu_matmul import race

MANY = 64  # rows beyond which the faster type does not change any more
_ROWS = (4, 8, 16, 32, MANY)


@cache
def pays_up_to() -> int:
    """The most rows that this processor multiplies faster in bfloat16 than in float32: 0 to `MANY`,
    which stands for any number. Measured in 50 ms (drafters/vllm/cpu_matmul.py).
    """
    if not current_platform.is_cpu() or not torch.cpu._is_avx512_bf16_supported():
        return 0
    most = 0
    for rows, (in_half, in_full) in zip(_ROWS, race(_ROWS), strict=True):
        if in_half >= in_full:
            break
        most = rows
    return most


def is_wide(layer: Any) -> bool:
    """Whether a layer has a float32 weight matrix that is loaded. A quantised layer has none."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta:
        return False
    return weight.ndim == 2 and weight.dtype == torch.float32


@contextmanager
def half_precision() -> Iterator[None]:
    """Linear layers loaded inside multiply in bfloat16; their inputs and outputs keep their type.

    vLLM prepares a layer's weight for its matrix kernels once it is loaded
    (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm), which is replaced.
    """
    prepare = utils.dispatch_cpu_unquantized_gemm

    def prepare_half(layer: Any, remove_weight: bool) -> None:
        if not remove_weight or not is_wide(layer):
            prepare(layer, remove_weight)  # a weight that stays may be an embedding's too
            return
        layer.weight = torch.nn.Parameter(layer.weight.to(torch.bfloat16), requires_grad=False)
        prepare(layer, remove_weight)
        multiply = layer.cpu_linear

        def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
            y: torch.Tensor = multiply(x.to(torch.bfloat16), weight, None)
            y = y.to(x.dtype)
            return y if bias is None else y + bias

        layer.cpu_linear = cpu_linear

    utils.dispatch_cpu_unquantized_gemm = prepare_half
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = prepare


def twin(layer: Any) -> Any:
    """A copy of `layer` with a bfloat16 weight of its own, for drafts. `layer` itself, which the
    target uses too, stays float32."""
    other = copy(layer)
    other._parameters = dict(layer._parameters)
    with half_precision():
        utils.dispatch_cpu_unquantized_gemm(other, remove_weight=True)
    return other
