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
from resource import RUSAGE_SELF, getrusage
from time import perf_counter

import torch
from vllm.model_executor.layers import utils

# For a number of rows: the processes beside this one rarely leave it no core for longer.
PATIENCE_S = 0.5


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
    `rows`: (in `narrow`, in float32), each the fastest of `rounds` * `copies` products or more.

    With more `copies` of the weight than the cache holds, reading memory counts too, as it does in
    a whole model. It is a single product that is the fastest, not a round of them: beside a busy
    process a thread waits for its core some milliseconds at a time, and all threads have to run
    for the time of one product only. Rounds of several copies go on, for PATIENCE_S at most, until
    a product of each type had its cores to itself.
    """
    weight = torch.randn(outputs, inputs)
    stacks = [
        [_layer(weight.to(dtype)) for _ in range(copies)] for dtype in (narrow, torch.float32)
    ]
    results = []
    for count in rows:
        x = torch.randn(count, inputs)
        batches = [x.to(narrow), x]
        fastest, undisturbed = [math.inf, math.inf], [copies < 2] * 2
        done, began = 0, perf_counter()
        while done < rounds or (not all(undisturbed) and perf_counter() - began < PATIENCE_S):
            # In turns, so that whatever else runs on this machine slows down both.
            for kind, (stack, batch) in enumerate(zip(stacks, batches, strict=True)):
                seconds, calm = _fastest(stack, batch)
                fastest[kind] = min(fastest[kind], seconds)
                undisturbed[kind] |= calm
            done += 1
        results.append((fastest[0], fastest[1]))
    return results


def _layer(weight: torch.Tensor) -> torch.nn.Module:
    """A linear layer as vLLM prepares it for its CPU kernels."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer


def _fastest(layers: Sequence[torch.nn.Module], x: torch.Tensor) -> tuple[float, bool]:
    """Seconds of the fastest product of `x` with one of the layers, and whether one of them had its
    cores to itself: no thread of this process was preempted in it, nor in the product before, in
    which all threads of the next one were awake."""
    fastest, undisturbed = math.inf, False
    calm_before = False
    for layer in layers:
        before, began = _preemptions(), perf_counter()
        layer.cpu_linear(x, layer.weight, None)
        fastest = min(fastest, perf_counter() - began)
        calm = _preemptions() == before
        undisturbed |= calm and calm_before
        calm_before = calm
    return fastest, undisturbed


def _preemptions() -> int:
    """How often a thread of this process had to leave its core to another process."""
    return getrusage(RUSAGE_SELF).ru_nivcsw
