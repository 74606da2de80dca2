"""What a step of a GPU server holds: sequences, tokens and CUDA graphs, and what graphs take.

Pure: no vllm import. The engine's options, the estimate of memory and `aerie models` read it.
docs/decisions/0023-gpu-defaults.md says why these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from drafters.config import captured_ks
from drafters.graph_sizes import GraphCounts, capture_sizes, count_graphs
from drafters.model.config import Method

GIB = 1024**3
# Most sequences of a server that drafts, unless its operator names a number: each has K + 1 rows of
# logits, and vLLM's profile of memory counts one (gpu/model_runner.py, profile_run). At K = 7 and
# 150,000 tokens of vocabulary those of 256 sequences are 0.6 GiB of bfloat16, of 1,024 they would
# be 2.3 GiB. On V2 the copy in float32 takes 1 GiB at most (rejection_sampler.py, MAX_CHUNK_BYTES);
# on V1 it is whole, 1.1 or 4.6 GiB.
DRAFTING_SEQUENCES = 256
SIZES, LARGEST = "cudagraph_capture_sizes", "max_cudagraph_capture_size"
# Seconds and MiB of a graph for each layer that it records: allowances from published logs. Whole
# steps: 15 graphs a second (vLLM's pull request 46389). Parts: 7.6 a second with 48 layers (issue
# 30172), 8 with 40 (50722). Memory: 7.5 MiB with 32 layers (pie-project/pie 348), 6 MiB with 16 and
# the pool's first block (vLLM 11349). On an H200 captures took 7.2 s where these give 7, and up to
# 0.94 MiB a layer: those of vLLM's profile were counted too (docs/gpu.md).
FULL_S, PARTS_S, GRAPH_MIB = 0.0016, 0.003, 0.25


class ServerDefaults(NamedTuple):
    """What vLLM gives its own server on a GPU (EngineArgs.get_batch_defaults)."""

    tokens: int  # max_num_batched_tokens
    sequences: int  # max_num_seqs


class StepShape(NamedTuple):
    """The largest step of an engine."""

    sequences: int
    tokens: int
    sizes: list[int]  # cudagraph_capture_sizes; empty where they are left to vLLM


class GraphEstimate(NamedTuple):
    """CUDA graphs of a start, and about what their capture takes."""

    counts: GraphCounts
    seconds: float
    gib: float

    def __str__(self) -> str:
        full, parts, head = self.counts
        return (
            f"{full} of the target's decode steps, {parts} of its parts, {head} of the head: "
            f"about {self.seconds:.0f} s and {self.gib:.1f} GiB"
        )


def server_defaults(gpu_gib: float, name: str = "") -> ServerDefaults:
    """The defaults of vLLM 0.32's server on a GPU that is not here, by its memory in GiB. A test
    holds them to vLLM's own."""
    if gpu_gib >= 160:
        return ServerDefaults(16384, 1024)
    if gpu_gib >= 70 and "a100" not in name.lower():
        return ServerDefaults(8192, 1024)
    return ServerDefaults(2048, 256)


def step_shape(
    given: Mapping[str, Any], gpu: ServerDefaults, k: int, method: Method | None, lookup_k: int = 0
) -> StepShape:
    """The largest step of a server that drafts up to `k` tokens, without a head where `method` is
    None, and by lookup up to `lookup_k` beside a head.

    `given` has vLLM's engine arguments that an operator set, by name; they win. Prompts get the
    room that vLLM's own server leaves them: beside its tokens a step has, for each sequence, the
    drafts to verify, K or `lookup_k`, and the slots of a P-EAGLE head, K - 1. At K = 0 all is as
    vLLM has it.
    """
    factor = 2 if given.get("performance_mode") == "throughput" else 1  # as in vLLM
    default = factor * (min(gpu.sequences, DRAFTING_SEQUENCES) if k else gpu.sequences)
    sequences = given.get("max_num_seqs") or default
    drafts = max(k, lookup_k) if k else 0
    slots = drafts + k - 1 if method == "p-eagle" and k else drafts
    room = factor * gpu.tokens
    if has_whole_prompts(given):
        room = max(room, given.get("max_model_len") or 0)
    tokens = given.get("max_num_batched_tokens") or room + sequences * slots
    ours = k and not _sizes_are_given(given)
    sizes = capture_sizes(captured_ks(drafts), sequences, tokens) if ours else []
    return StepShape(sequences, tokens, sizes)


def has_whole_prompts(given: Mapping[str, Any]) -> bool:
    """Whether a step reads prompts whole: it must then have room for the longest one."""
    return given.get("enable_chunked_prefill") is False


def estimate_graphs(
    counts: GraphCounts, k: int, method: Method | None, layers: int, head_layers: int
) -> GraphEstimate:
    """What it takes to capture so many graphs, with so many layers of target and head. Those of the
    head are captured twice: vLLM measures their memory that way."""
    full, parts, head = counts
    passes = head_layers * (1 if method == "p-eagle" else max(1, k - 1))
    seconds = layers * (full * FULL_S + parts * PARTS_S) + 2 * head * passes * FULL_S
    mib = GRAPH_MIB * (layers * (full + parts) + passes * head)
    return GraphEstimate(counts, seconds, mib / 1024)


def graphs_of(shape: StepShape, k: int, method: Method | None) -> GraphCounts:
    """The graphs that vLLM's V2 model runner captures for steps of a shape."""
    parallel = method == "p-eagle"
    counts = count_graphs(
        shape.sizes, captured_ks(k), shape.sequences, shape.tokens, parallel=parallel
    )
    return counts if method is not None else counts._replace(head=0)


def _sizes_are_given(given: Mapping[str, Any]) -> bool:
    """Whether an operator, or a mode that they chose, decides on the sizes of graphs."""
    compilation = given.get("compilation_config") or {}
    if not isinstance(compilation, Mapping):  # read by vLLM's own parser
        compilation = vars(compilation)
    named = (source.get(name) for source in (given, compilation) for name in (SIZES, LARGEST))
    whole = given.get("performance_mode") == "interactivity" or given.get("enforce_eager")
    return bool(whole) or any(value is not None for value in named)
