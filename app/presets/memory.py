"""How much memory a pair needs on each GPU, before anything is downloaded.

    weights + head + KV cache of one longest sequence + the drafter's store + CUDA graphs
        + overhead <= share of the GPU that vLLM may use

vLLM refuses to start when the KV cache cannot hold one sequence of `max_model_len`, so this is
what a start needs; more memory is more sequences at once. All figures are GiB on each GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.engine.configuration.capacity import (
    GraphEstimate,
    StepShape,
    estimate_graphs,
    graphs_of,
    server_defaults,
    step_shape,
)
from app.presets.about import About, TargetFacts
from app.settings import Settings
from drafters.config import MAX_DEFERRED_STEPS
from drafters.model.config import Method

GIB = 1024**3
UTILISATION = 0.92  # vLLM's default (vllm/config/cache.py)
# CUDA context and activations of the largest step. An allowance, not a measurement.
OVERHEAD_GIB = 3.0
SHORTEST = 1024  # tokens: the shortest context that anybody would serve
H100_GIB = 79.6  # of the GPU that is meant where none is named
BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
# Bytes of a parameter in weights that are quantised while they load. Embeddings and the output
# matrix stay at two: 0.6 GiB more for Qwen3-Coder, left to the overhead.
QUANTISED = {"fp8_per_tensor": 1, "fp8_per_block": 1, "fp8_per_channel": 1}


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a target and its head need on each GPU, in GiB, part by part."""

    weights: float
    head: float
    kv: float  # of one sequence of `length`, or what `kv_cache_gib` says
    store: float  # hidden states that the drafter keeps of tokens it was not run for
    graphs: float  # CUDA graphs
    overhead: float
    length: int
    token_bytes: int  # KV cache of one more token of a long sequence, head included
    gpus: int

    @property
    def total(self) -> float:
        """GiB that one GPU must hold."""
        parts = (self.weights, self.head, self.kv, self.store, self.graphs, self.overhead)
        return sum(parts)

    def sum(self) -> str:
        """The sum with all its parts, as a line of text."""
        everywhere = f" on each of {self.gpus} GPUs" if self.gpus > 1 else ""
        return (
            f"weights {self.weights:.1f} + head {self.head:.1f} + KV cache {self.kv:.1f} "
            f"(one sequence of {self.length:,} tokens; {self.token_bytes:,} bytes for one more)"
            f" + hidden states {self.store:.1f} + CUDA graphs {self.graphs:.1f}"
            f" + overhead {self.overhead:.1f} = {self.total:.1f} GiB{everywhere}"
        )


def capacity(settings: Settings, about: About, gpu_gib: float = H100_GIB) -> StepShape:
    """The largest step of an engine on GPUs of `gpu_gib`."""
    engine = settings.engine
    given: dict[str, Any] = {
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enforce_eager": engine.enforce_eager,
        **engine.engine_args,
    }
    gpu = server_defaults(gpu_gib)
    return step_shape(given, gpu, *_drafting(settings, about))


def _drafting(settings: Settings, about: About) -> tuple[int, Method | None]:
    """The most draft tokens of a request on a GPU, and how the head drafts; None without one."""
    if not settings.speculates:
        return 0, None
    if not settings.has_head:
        return settings.speculation.lookup_k, None
    return settings.speculation.k, about.head.method if about.head else "p-eagle"


def graphs(settings: Settings, about: About, gpu_gib: float = H100_GIB) -> GraphEstimate | None:
    """The CUDA graphs of an engine that drafts; None where nothing is known of its models."""
    target, head = about.target, about.head
    if target is None or not settings.speculates or (settings.has_head and head is None):
        return None
    (k, method), shape = _drafting(settings, about), capacity(settings, about, gpu_gib)
    layers = sum(group.layers for group in target.kv)
    head_layers = head.layers if head is not None and method is not None else 0
    return estimate_graphs(graphs_of(shape, k, method), k, method, layers, head_layers)


def need(
    settings: Settings, about: About, gpus: int | None = None, gpu_gib: float = H100_GIB
) -> Need | None:
    """What `settings` need on each of `gpus` (default: their tensor parallel size) of `gpu_gib`;
    None where nothing is known of the target."""
    target = about.target
    if target is None:
        return None
    gpus = gpus or settings.engine.tensor_parallel_size
    engine = settings.engine
    dtype = BYTES[settings.model.dtype]
    length = engine.max_model_len or target.max_length
    if engine.max_model_len is None and engine.engine_args.get("max_model_len") == -1:
        length = SHORTEST  # vLLM takes the longest that fits (app/settings/engine.py)
    head = about.head if settings.has_head else None
    head_layers = head.layers if head else 0
    cache_dtype = str(engine.engine_args.get("kv_cache_dtype", "auto"))
    cell = 1 if cache_dtype.startswith("fp8") else dtype
    shape, captured = capacity(settings, about, gpu_gib), graphs(settings, about, gpu_gib)
    # vLLM lays out the next step while one runs: tokens of both are in flight.
    kv = _kv_bytes(target, head_layers, length, 2 * shape.tokens, cell, gpus)
    kept = shape.sequences * MAX_DEFERRED_STEPS
    store = kept * head.taps * target.hidden_size * dtype if head else 0
    return Need(
        weights=_weights_bytes(target, settings) / gpus / GIB,
        head=(head.parameters_b * 1e9 * 2 / gpus / GIB) if head else 0.0,
        kv=engine.kv_cache_gib or kv / GIB,
        store=store / GIB,
        graphs=captured.gib if captured else 0.0,
        overhead=OVERHEAD_GIB,
        length=length,
        token_bytes=_kv_bytes(target, head_layers, 1, 0, cell, gpus, unbounded_only=True),
        gpus=gpus,
    )


def usable(settings: Settings, gpu_gib: float) -> float:
    """GiB of a GPU that vLLM may use."""
    return gpu_gib * (settings.engine.gpu_memory_utilization or UTILISATION)


def fewest_gpus(settings: Settings, about: About, gpu_gib: float, most: int = 8) -> int | None:
    """The least tensor parallel size, a power of two, with which the pair fits GPUs of `gpu_gib`.

    None if that is more than `most`.
    """
    gpus = 1
    while gpus <= most:
        needed = need(settings, about, gpus, gpu_gib)
        if needed is None or needed.total <= usable(settings, gpu_gib):
            return gpus
        gpus *= 2
    return None


def longest(settings: Settings, about: About, gpu_gib: float) -> int:
    """The longest max_model_len, in steps of 1,024, with which the pair fits; 0 if none does."""
    assert about.target is not None
    low, high = 0, about.target.max_length // 1024
    while low < high:
        middle = (low + high + 1) // 2
        engine = settings.engine.model_copy(update={"max_model_len": middle * 1024})
        needed = need(settings.model_copy(update={"engine": engine}), about, None, gpu_gib)
        if needed is not None and needed.total <= usable(settings, gpu_gib):
            low = middle
        else:
            high = middle - 1
    return low * 1024


def _weights_bytes(target: TargetFacts, settings: Settings) -> float:
    if (size := QUANTISED.get(settings.model.quantization or "")) is not None:
        return target.parameters_b * 1e9 * size
    if target.weights_gib is not None:
        return target.weights_gib * GIB
    return target.parameters_b * 1e9 * BYTES[settings.model.dtype]


def _kv_bytes(
    target: TargetFacts,
    head_layers: int,
    length: int,
    in_flight: int,
    cell: int,
    gpus: int,
    *,
    unbounded_only: bool = False,
) -> int:
    """Bytes of KV cache on each GPU for one sequence of `length` tokens.

    A sliding layer keeps its window and the tokens in flight. The head's layers keep every token,
    and are taken to be as wide as the target's full ones.
    """
    total = 0
    for group in target.kv:
        if group.window is not None and unbounded_only:
            continue
        tokens = length if group.window is None else min(length, group.window + in_flight)
        width = 2 * -(-group.heads // gpus) * group.head_dim * cell  # heads are never split
        total += group.layers * tokens * width
    if head_layers:
        full = next((group for group in target.kv if group.window is None), target.kv[0])
        total += head_layers * length * 2 * -(-full.heads // gpus) * full.head_dim * cell
    return total
