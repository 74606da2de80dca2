"""Run a float32 draft head's matrix products in bfloat16, on a CPU where that is faster.

Rounding costs a head next to no acceptance and never a wrong token, since the target verifies each
draft. The target keeps its own type (docs/decisions/0004).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

from drafters.vllm.cpu_matmul import race

MANY = 64  # rows beyond which the faster type does not change any more
_ROWS = (4, 8, 16, 32, MANY)
_halves: ContextVar[bool] = ContextVar("halves", default=False)


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
    """The linear layers of heads that are built inside multiply in bfloat16."""
    token = _halves.set(True)
    try:
        yield
    finally:
        _halves.reset(token)


def halve_linear_layers(head: torch.nn.Module) -> None:
    """Let the linear layers of a head without weights multiply in bfloat16, if it is built inside
    `half_precision`; their inputs and outputs keep their type. Quantised layers are left alone."""
    if not _halves.get():
        return
    for layer in head.modules():
        if type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod:
            layer.quant_method = HalfLinearMethod()


class HalfLinearMethod(UnquantizedLinearMethod):
    """vLLM's matrix product of a linear layer, in bfloat16 whatever type the layer has."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Round the loaded weight, and have vLLM prepare it for its matrix kernels."""
        halved(layer, super().process_weights_after_loading)


def halved(layer: Any, prepare: Callable[[Any], None]) -> None:
    """Round the weight of a float32 layer to bfloat16 before `prepare` makes `cpu_linear` of it,
    and let that take and return the type of its input. Layers of other types are only prepared."""
    if not is_wide(layer):
        prepare(layer)
        return
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.bfloat16), requires_grad=False)
    prepare(layer)
    multiply = layer.cpu_linear

    def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        y: torch.Tensor = multiply(x.to(torch.bfloat16), weight, None)
        y = y.to(x.dtype)
        return y if bias is None else y + bias

    layer.cpu_linear = cpu_linear


def twin(layer: Any) -> Any:
    """A copy of `layer` with a bfloat16 weight of its own, for drafts. `layer` itself, which the
    target uses too, stays float32."""
    other = copy(layer)
    other._parameters = dict(layer._parameters)
    halved(other, partial(utils.dispatch_cpu_unquantized_gemm, remove_weight=True))
    return other
