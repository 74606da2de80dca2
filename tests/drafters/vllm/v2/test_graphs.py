"""CUDA graphs of the V2 speculator's pass: which fit, and which are left when vLLM drops some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from drafters.vllm.v2 import graphs
from drafters.vllm.v2.graphs import Graphs
from drafters.vllm.v2.speculator import ParallelSpeculator

K_MAX = 4


class Manager(CudaGraphManager):
    """A manager without a GPU, which has a graph for every batch."""

    def __init__(self, *_: Any, decode_query_len: int) -> None:
        self.decode_query_len = decode_query_len
        self.captured, self.ran = 0, list[Any]()

    def dispatch(self, count: int, tokens: int, width: int, *_: Any) -> BatchExecutionDescriptor:
        assert width == self.decode_query_len and tokens == count * width
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, tokens, count, width)

    def capture(self, *_: Any, **__: Any) -> None:
        self.captured += 1

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> None:
        self.ran.append(desc)


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A speculator with graphs."""
    monkeypatch.setattr(graphs, "DFlashCudaGraphManager", Manager)
    speculator = SimpleNamespace()
    speculator._graphs = made(speculator, K_MAX)
    return speculator


def made(owner: Any, k_max: int) -> Graphs:
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=64),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
    )
    return Graphs(config, torch.device("cpu"), k_max, owner)


def drop_as_vllm_does(speculator: Any) -> int:
    """The loops of `profile_cudagraph_memory` over a speculator; how many managers they found."""
    names = [
        name for name, value in vars(speculator).items() if isinstance(value, CudaGraphManager)
    ]
    for name in names:
        setattr(speculator, name, None)
    return len(names)


def test_the_graphs_of_a_memory_profile_can_be_dropped(owner: Any) -> None:
    """The fault: vLLM found none of the managers, so that the graphs of its profile kept their
    memory, in a pool that was gone."""
    found: Graphs = owner._graphs
    entered = np.array([2, 1])
    for k in range(1, K_MAX + 1):
        assert found.find(k, entered, room=99) is not None
    found.capture(lambda *_: None)
    assert drop_as_vllm_does(owner) == K_MAX
    for k in range(K_MAX + 1):
        assert found.find(k, entered, room=99) is None
    found.capture(lambda *_: None)  # of none
    again = made(owner, K_MAX)
    assert again.find(1, entered, room=99) is not None


def test_a_backend_without_graphs_leaves_none_of_earlier_ones(owner: Any) -> None:
    owner.attn_cg_support = SimpleNamespace(min_cg_support=AttentionCGSupport.NEVER)
    owner.attn_groups, owner.group = [[]], 0
    ParallelSpeculator.init_cudagraph_manager(owner, CUDAGraphMode.FULL_DECODE_ONLY)
    assert owner._graphs is None


@pytest.mark.parametrize(
    ("k", "entered", "room", "of"),
    [
        (2, [3, 3], 99, 2),
        (2, [5, 1], 99, 4),  # entered tokens of the K before
        (2, [6, 1], 99, None),  # as with a prompt: the last one lies beyond every graph
        (0, [1, 1], 99, None),
        (3, [4, 2], 4, 3),  # six places, of which four may be behind the second's
        (3, [4, 2], 3, None),
    ],
)
def test_a_graph_holds_the_last_entered_token_and_ends_within_the_room(
    owner: Any, k: int, entered: list[int], room: int, of: int | None
) -> None:
    shape = owner._graphs.find(k, np.array(entered), room)
    assert (shape and graphs.drafted(shape)) == of
    if shape is not None:
        owner._graphs.run(shape)
        assert getattr(owner, f"graph_manager_{of}").ran == [shape]


def test_a_k_without_graphs_takes_those_of_the_next(owner: Any) -> None:
    """Graphs are captured for few K; a pass that drafts fewer is padded."""
    found = made(owner, 7)
    for k, of in ((1, 1), (4, 5), (6, 7), (7, 7)):
        shape = found.find(k, np.array([k + 1, 1]), room=99)
        assert shape is not None and graphs.drafted(shape) == of
    assert found.find(6, np.array([9, 1]), room=99) is None  # more than the largest enters
