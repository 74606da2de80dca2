"""Sizes of CUDA graphs: what they cover, and what padding costs."""

from __future__ import annotations

import pytest

from drafters.config import captured_ks
from drafters.graph_sizes import (
    MEMORY_BOUND_TOKENS,
    MOST_TOKENS,
    batches,
    capture_sizes,
    count_graphs,
    head_batches,
    token_sizes,
)

SHAPES = [(1, 1), (1, 7), (4, 5), (100, 7), (128, 5), (128, 7), (128, 10), (256, 11), (1024, 7)]


def whole_steps(sizes: list[int], k: int, sequences: int) -> list[int]:
    """Batch sizes of the graphs that vLLM makes of capture sizes for steps with K drafts."""
    counts = {-(-size // (k + 1)) for size in sizes}
    return sorted(n for n in counts if n <= sequences and n * (k + 1) <= sizes[-1])


@pytest.mark.parametrize(("sequences", "k_max"), SHAPES)
def test_whole_steps_of_all_sequences_have_a_graph_at_each_captured_k(
    sequences: int, k_max: int
) -> None:
    sizes = capture_sizes(captured_ks(k_max), sequences, budget=100_000)
    for k in captured_ks(k_max):
        largest = whole_steps(sizes, k, sequences)[-1]
        assert largest == min(sequences, MOST_TOKENS // (k + 1)) or (
            largest * (k + 1) > 0.75 * MOST_TOKENS  # beyond, a step takes longer than its launches
        )


@pytest.mark.parametrize(("sequences", "k_max"), SHAPES)
def test_little_is_padded(sequences: int, k_max: int) -> None:
    """By less than a half while a step waits for memory, then by a quarter at most."""
    sizes = capture_sizes(captured_ks(k_max), sequences, budget=100_000)
    for k in captured_ks(k_max):
        graphs = whole_steps(sizes, k, sequences)
        padding = []
        for requests in range(1, graphs[-1] + 1):
            graph = next(n for n in graphs if n >= requests)
            padding.append(graph / requests - 1)
            limit = 0.5 if requests * (k + 1) < MEMORY_BOUND_TOKENS else 0.25
            assert (graph - requests) * (k + 1) <= limit * requests * (k + 1) + k
        assert sum(padding) / len(padding) < 0.2


def test_graphs_are_few() -> None:
    """Naming every K and leaving the sizes to vLLM makes 531 of K = 10, and 117 of the head."""
    for k, most in ((5, 80), (7, 100), (10, 120)):
        sizes = capture_sizes(captured_ks(k), 128, budget=8192 + 128 * (2 * k - 1))
        counts = count_graphs(sizes, captured_ks(k), 128, 8192 + 128 * (2 * k - 1), parallel=True)
        assert counts.full <= most and counts.parts <= 26 and counts.head <= most


def test_a_step_is_never_larger_than_its_budget() -> None:
    assert capture_sizes(captured_ks(7), 128, budget=100)[-1] == 100
    assert head_batches(7, 128, largest=1024, budget=100)[-1] == 7


def test_the_head_has_graphs_for_as_many_requests_as_the_target() -> None:
    assert head_batches(7, 128, largest=1024, budget=9856)[-1] == 128
    assert head_batches(7, 128, largest=512, budget=9856)[-1] == 64  # an operator's limit
    assert head_batches(7, 128, largest=0, budget=9856) == []


def test_sizes_end_with_the_largest() -> None:
    assert token_sizes(1) == [1]
    assert token_sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert token_sizes(600)[-6:] == [256, 320, 384, 448, 512, 600]
    assert batches(6, 10) == [1, 2, 3, 4, 6, 8, 10]
