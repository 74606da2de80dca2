"""Sizes of CUDA graphs: few, so that a start is short, and close enough that little is padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Up to so many tokens a step of bfloat16 weights waits for memory, and padding costs next to
# nothing: an H100 does 295 operations for each byte that it reads, an H200 206, a B200 281.
MEMORY_BOUND_TOKENS = 256
# Beyond, a step computes for longer than its kernels take to be launched: 4,096 tokens of an 8B
# model are 0.1 s of an H100, and thousands of launches 10 ms, in which the last step still runs.
MOST_TOKENS = 4096


class GraphCounts(NamedTuple):
    """How many CUDA graphs are captured."""

    full: int  # of the target, each a whole decode step at one K
    parts: int  # of the target without its attention, for steps with prompts
    head: int


def token_sizes(most: int) -> list[int]:
    """Numbers of tokens that get a graph, up to and with `most`: two in each doubling while a step
    waits for memory (padded by less than a half, 16% on average), then four (a quarter, 7%)."""
    sizes = {most}
    for power in (1 << exponent for exponent in range(most.bit_length())):
        quarters = (4, 6) if power < MEMORY_BOUND_TOKENS else (4, 5, 6, 7)
        sizes |= {power * quarter // 4 for quarter in quarters if power * quarter % 4 == 0}
    return sorted(size for size in sizes if size <= most)


def batches(width: int, most: int) -> list[int]:
    """Batch sizes, 1 to `most`, that get a graph with `width` tokens of each request."""
    return sorted({min(most, -(-size // width)) for size in token_sizes(most * width)} - {0})


def capture_sizes(ks: Sequence[int], sequences: int, budget: int) -> list[int]:
    """The target's `cudagraph_capture_sizes`, in tokens, for a batch of up to `sequences` requests
    with each of `ks` drafts. `budget` is the most tokens of a step.

    vLLM captures each size for steps with prompts, and rounded up to whole requests of K + 1
    tokens for each K (v1/worker/gpu/cudagraph_utils.py, _init_candidates). The largest batch at
    each K is a size of its own.
    """
    most = min(MOST_TOKENS, budget, sequences * (max(ks) + 1))
    largest = {sequences * (k + 1) for k in ks}
    return sorted({*token_sizes(most), *(size for size in largest if size <= most)})


def head_batches(k: int, sequences: int, largest: int, budget: int) -> list[int]:
    """Batch sizes of a P-EAGLE head's graphs for K, with 2 K tokens of each request: those that
    the target's largest graph, of `largest` tokens, covers too."""
    return batches(2 * k, min(sequences, largest // (k + 1), budget // (2 * k)))


def count_graphs(
    sizes: Sequence[int], ks: Sequence[int], sequences: int, budget: int, *, parallel: bool
) -> GraphCounts:
    """The graphs of vLLM's V2 model runner for the target's capture `sizes`. `parallel` is whether
    the head is P-EAGLE's; an EAGLE-3 head has vLLM's own graphs: those of the target for its first
    pass, and for each K one of all the others."""
    largest = max(sizes, default=0)

    def whole(width: int) -> set[int]:
        """Batch sizes of the target's graphs with `width` tokens of each request."""
        counts = {-(-size // width) for size in sizes}
        return {n for n in counts if n <= sequences and n * width <= largest}

    full, drafting = sum(len(whole(k + 1)) for k in ks), [k for k in ks if k]
    if parallel:
        head = sum(len(head_batches(k, sequences, largest, budget)) for k in drafting)
    else:
        head = full + len(sizes) + len(whole(1)) * sum(k > 1 for k in drafting)
    return GraphCounts(full, len(sizes), head)
