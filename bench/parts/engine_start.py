"""What the start of an engine came to: runner, drafter, attention, graphs, memory and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from bench.parts.offline import model_runner
from drafters.markdown import columns

GIB = 2**30


@dataclass(slots=True)
class CaptureTotals:
    """CUDA graphs that were captured to be kept: vLLM's memory profile captures some, measures
    them and throws them away."""

    graphs: int = 0  # a step in parts has one for each part: a layer more than the target has
    seconds: float = 0.0  # within captures, without the warm-up between them
    bytes: int = 0  # of the device, that captures took


@contextmanager
def captures() -> Iterator[CaptureTotals]:
    """Count the captures of CUDA graphs by anyone in this process, by way of torch's own class."""
    from vllm.v1.worker.gpu_worker import Worker

    totals, free, begun = CaptureTotals(), 0, 0.0
    enter, leave = torch.cuda.graph.__enter__, torch.cuda.graph.__exit__
    profile = Worker.determine_available_memory

    def entered(self: Any) -> None:
        nonlocal free, begun
        begun = perf_counter()
        enter(self)
        free = torch.cuda.mem_get_info()[0]

    def left(self: Any, *error: Any) -> None:
        totals.bytes += free - torch.cuda.mem_get_info()[0]
        leave(self, *error)
        totals.graphs += 1
        totals.seconds += perf_counter() - begun

    def profiled(self: Worker) -> int:
        available = profile(self)
        totals.graphs, totals.seconds, totals.bytes = 0, 0.0, 0
        return available

    with (
        patch.object(torch.cuda.graph, "__enter__", entered),
        patch.object(torch.cuda.graph, "__exit__", left),
        patch.object(Worker, "determine_available_memory", profiled),
    ):
        yield totals


def started(arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Start a vLLM `LLM` in this process; returns it and the figures of its start."""
    from vllm import LLM

    begun = perf_counter()
    with captures() as totals:
        llm = LLM(**arguments)
    return llm, figures(llm, totals, perf_counter() - begun)


def figures(llm: Any, totals: CaptureTotals, seconds: float) -> dict[str, Any]:
    """Figures of an engine that runs in this process, whose start took `seconds`."""
    runner, config = model_runner(llm), llm.llm_engine.vllm_config
    v2 = hasattr(runner, "speculator")
    drafter = runner.speculator if v2 else getattr(runner, "drafter", None)
    compilation, scheduler, cache = (
        config.compilation_config, config.scheduler_config, config.cache_config
    )  # fmt: skip
    return {
        "runner": "V2" if v2 else "V1",
        "drafter": None if drafter is None else type(drafter).__name__,
        "attention": _backends(runner.attn_groups),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tokens_a_step": scheduler.max_num_batched_tokens,
        "requests": scheduler.max_num_seqs,
        "graph_mode": str(compilation.cudagraph_mode),
        "capture_sizes": len(compilation.cudagraph_capture_sizes or ()),
        "largest_capture_size": compilation.max_cudagraph_capture_size,
        "graphs": totals.graphs,
        "capture_seconds": round(totals.seconds, 2),
        "graph_gib": round(totals.bytes / GIB, 3),
        "start_seconds": round(seconds, 1),
        "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        **_memory(),
    }


def start_table(starts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table of `figures` by engine, below a heading; none without any."""
    if not starts:
        return []
    shown = ("runner", "drafter", "attention", "tokens_a_step", "requests", "graph_mode", "graphs",
             "capture_seconds", "graph_gib", "start_seconds", "device_gib")  # fmt: skip
    rows = [["engine", *(name.replace("_", " ") for name in shown)]]
    for engine, start in starts.items():
        rows.append([engine, *(_text(start.get(name)) for name in shown)])
    return ["", "How the engines started:", *columns(rows)]


def _backends(groups: Any) -> list[str]:
    """Names of the attention backends of a runner's groups of layers, each once."""
    return sorted({group.backend.get_name() for layers in groups for group in layers})


def _memory() -> dict[str, float]:
    """GiB of the device that are taken, by anyone; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"device_gib": round((total - free) / GIB, 2)}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
