"""What an engine's start came to: captures of CUDA graphs are counted, and figures make a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from bench.parts.engine_start import GIB, captures, figures, start_table

FREE = [9 * GIB, 8 * GIB, 8 * GIB, 7 * GIB]  # before and after each of two captures


def capture(pool: int) -> None:
    """As torch.cuda.graph is used, without a GPU to capture on."""
    graph = torch.cuda.graph.__new__(torch.cuda.graph)
    with graph:
        assert pool


def test_captures_are_counted_where_anyone_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, left, free = [], [], iter(FREE)
    monkeypatch.setattr(torch.cuda.graph, "__enter__", lambda self: entered.append(self))
    monkeypatch.setattr(torch.cuda.graph, "__exit__", lambda self, *error: left.append(error))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 80 * GIB))
    clock = iter([100.0, 101.0, 103.0, 104.5])  # seconds between captures are warm-up
    monkeypatch.setattr("bench.parts.engine_start.perf_counter", lambda: next(clock))
    before = torch.cuda.graph.__enter__
    with captures() as totals:
        capture(1)
        capture(2)
    assert (totals.graphs, totals.seconds, totals.bytes) == (2, 2.5, 2 * GIB)
    assert len(entered) == 2 and left == [(None, None, None)] * 2
    assert torch.cuda.graph.__enter__ is before


def test_captures_of_the_memory_profile_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.graph, "__enter__", lambda self: None)
    monkeypatch.setattr(torch.cuda.graph, "__exit__", lambda self, *error: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 * GIB, 80 * GIB))
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: capture(1) or 7)
    with captures() as totals:
        assert Worker.determine_available_memory(Worker.__new__(Worker)) == 7
        assert (totals.graphs, totals.seconds) == (0, 0.0)
        capture(2)
    assert totals.graphs == 1 and totals.seconds > 0


class Speculator:
    pass


def engine(**runner: Any) -> Any:
    """As much of a vLLM `LLM` as is looked at."""
    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    runner = {"attn_groups": [[group], [group, group]], **runner}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2], max_cudagraph_capture_size=2
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=64),
        cache_config=SimpleNamespace(num_gpu_blocks=100, block_size=16),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(**runner)))
    core = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    engine_core = SimpleNamespace(engine_core=core)
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=engine_core, vllm_config=config))


@pytest.mark.parametrize(
    ("runner", "path", "drafter"),
    [
        ({"speculator": Speculator()}, "V2", "Speculator"),
        ({"speculator": None}, "V2", None),
        ({"drafter": Speculator()}, "V1", "Speculator"),
        ({}, "V1", None),
    ],
)
def test_a_start_says_which_path_runs(
    runner: dict[str, Any], path: str, drafter: str | None
) -> None:
    with captures() as totals:
        found = figures(engine(**runner), totals, 12.34)
    assert (found["runner"], found["drafter"]) == (path, drafter)
    assert found["attention"] == ["FLASH_ATTN"]
    assert (found["graphs"], found["capture_seconds"], found["graph_gib"]) == (0, 0.0, 0.0)
    assert (found["start_seconds"], found["kv_cache_tokens"]) == (12.3, 1600)
    lines = start_table({"gateway": found})
    assert lines[2].split("|")[1:3] == [" engine  ", " runner "]
    assert lines[4].split("|")[1:3] == [" gateway ", f" {path}     "]
    assert start_table({}) == []
