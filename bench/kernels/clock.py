"""Time an operation, on a CPU core or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

GRAPHED = 20  # calls in a CUDA graph


class Arm(NamedTuple):
    """One of the implementations of an operation that are timed."""

    call: Callable[[], Any]
    moved: int  # bytes read and written
    on_device: bool = False  # without work on the host, so that a CUDA graph can record it


def best(arms: dict[str, Arm], rounds: int, device: str) -> dict[str, float]:
    """Microseconds of each arm, the best of `rounds`, in which the arms take turns."""
    calls = {name: (arm.call, 1) for name, arm in arms.items()}
    for arm in arms.values():
        arm.call()
    if device != "cpu":
        recorded = {name: arm.call for name, arm in arms.items() if arm.on_device}
        calls |= {f"{name} (graph)": (_graph(call), GRAPHED) for name, call in recorded.items()}
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, (call, count) in calls.items():
            found[name] = min(found[name], _seconds(call, device) / count * 1e6)
    return found


def _graph(call: Callable[[], Any]) -> Callable[[], None]:
    """Record a CUDA graph of GRAPHED calls, and run it once; returns its replay."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(GRAPHED):
            call()
    graph.replay()
    return graph.replay  # type: ignore[no-any-return]


def _seconds(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call: CPU time of this thread, as others share the core; a GPU's own clock."""
    if device == "cpu":
        begun = time.thread_time()
        call()
        return time.thread_time() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copied_per_us(rounds: int) -> float:
    """Bytes that the GPU reads and writes per microsecond when it copies 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = min(_seconds(lambda: target.copy_(source), "cuda") for _ in range(rounds))
    return 2 * len(source) / seconds / 1e6
