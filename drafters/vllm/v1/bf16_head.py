"""A float32 head that multiplies in bfloat16, on a CPU that can.

Drafts are guesses: rounding them costs next to no acceptance and never a wrong token, since the
target checks each. The target keeps its own type (docs/decisions/0004).
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

MANY = 64  # rows from which on more of them make no difference
_ROWS = (4, 8, 16, 32, MANY)


@cache
def pays_up_to() -> int:
    """The most rows that this processor multiplies faster in bfloat16 than in float32: 0 to `MANY`,
    which stands for any number. By trying (drafters/vllm/cpu_matmul.py), in 50 ms.
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
    """Whether a layer's weight is a float32 matrix that is there. A quantised layer has none."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta:
        return False
    return weight.ndim == 2 and weight.dtype == torch.float32


@contextmanager
def half_precision() -> Iterator[None]:
    """Linear layers that are loaded within are bfloat16 inside, their inputs and outputs not.

    vLLM prepares a layer's weight for its matrix kernels when it has been loaded
    (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm).
    """
    prepare = utils.dispatch_cpu_unquantized_gemm

    def prepare_half(layer: Any, remove_weight: bool) -> None:
        if not remove_weight or not is_wide(layer):
            prepare(layer, remove_weight)  # embeddings share their weight with what looks it up
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
    """`layer`, which the target uses too and which stays float32, with a bfloat16 weight of its
    own: half as much to read and to multiply for drafts."""
    other = copy(layer)
    other._parameters = dict(layer._parameters)
    with half_precision():
        utils.dispatch_cpu_unquantized_gemm(other, remove_weight=True)
    return other
