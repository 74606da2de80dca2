"""Time how fast this CPU multiplies a few rows by a weight matrix, in float32 and a narrower type.

The features that a processor lists do not tell. With AMX, bfloat16 is three times as fast as
float32 and costs the same for 1 and for 16 rows. A processor with AVX2 alone emulates bfloat16,
which pays for one row and never for several. A Xeon whose AMX a virtual machine hides lists
`avx512_bf16`: it multiplies at half the speed, but few rows gain, as half as much is read
(bench/LOG.md). So the kernels that vLLM's layers use are timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

import torch
from vllm.model_executor.layers import utils


def race(
    rows: Sequence[int],
    *,
    narrow: torch.dtype = torch.bfloat16,
    inputs: int = 512,
    outputs: int = 2048,
    copies: int = 1,
    rounds: int = 7,
) -> list[tuple[float, float]]:
    """Seconds of a product of `[rows, inputs]` with a weight `[outputs, inputs]`, for each entry of
    `rows`: (in `narrow`, in float32), each the fastest of `rounds` * `copies` products.

    With more `copies` of the weight than the cache holds, reading memory counts too, as it does in
    a whole model. It is a single product that is the fastest, not a round of them: beside a busy
    process a thread waits for its core some milliseconds at a time, and all threads have to run
    for the time of one product only.
    """
    weight = torch.randn(outputs, inputs)
    stacks = [
        [_layer(weight.to(dtype)) for _ in range(copies)] for dtype in (narrow, torch.float32)
    ]
    results = []
    for count in rows:
        x = torch.randn(count, inputs)
        batches = [x.to(narrow), x]
        # In turns, so that whatever else runs on this machine slows down both.
        took = [
            [_seconds(stack, batch) for stack, batch in zip(stacks, batches, strict=True)]
            for _ in range(rounds)
        ]
        in_narrow, in_full = map(min, zip(*took, strict=True))
        results.append((in_narrow, in_full))
    return results


def _layer(weight: torch.Tensor) -> torch.nn.Module:
    """A linear layer as vLLM prepares it for its CPU kernels."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer


def _seconds(layers: Sequence[torch.nn.Module], x: torch.Tensor) -> float:
    """Seconds of the fastest product of `x` with one of the layers."""
    fastest = math.inf
    for layer in layers:
        began = perf_counter()
        layer.cpu_linear(x, layer.weight, None)
        fastest = min(fastest, perf_counter() - began)
    return fastest
