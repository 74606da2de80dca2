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
from app.engine.configuration.options import SHARE_BESIDE_KV_SIZE
from app.presets.about import BYTES, About, KvLayers, TargetFacts
from app.settings import Settings
from drafters.config import MAX_DEFERRED_STEPS
from drafters.model.config import Method

GIB = 1024**3
UTILISATION = 0.92  # vLLM's default (vllm/config/cache.py)
# CUDA context and activations of the largest step. An allowance, not a measurement.
OVERHEAD_GIB = 3.0
SHORTEST = 1024  # tokens: the shortest context that anybody would serve
H100_GIB = 79.6  # of the GPU that is meant where none is named
# Bytes of a parameter in weights that are quantised while they load, scales included. Embeddings
# and the output matrix stay at two: 0.6 GiB more for Qwen3-Coder, left to the overhead.
QUANTISED = {
    "fp8_per_tensor": 1,
    "fp8_per_block": 1,
    "fp8_per_channel": 1,
    "mxfp8": 1.03,
    "mxfp4": 0.53,
    "experts_int8": 1,
    "int8_per_channel_weight_only": 1,
    "nvfp4_per_token": 0.56,
}
# Those that quantise experts alone, which are nearly all of a mixture and none of a dense target.
OF_EXPERTS = frozenset({"experts_int8", "int8_per_channel_weight_only", "nvfp4_per_token"})
# Bytes of an element of a key or value in vLLM's types of KV cache, with scales of heads of 128.
KV_BYTES = BYTES | {
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1.14,
    "nvfp4_ds_mla": 0.66,
    "fp8_per_token_head": 1.03,
    "int8_per_token_head": 1.03,
    "int4_per_token_head": 0.53,
    "nvfp4": 0.57,
    "nvfp4_4over6": 0.57,
    "turboquant_k8v4": 0.77,
    "turboquant_4bit_nc": 0.53,
    "turboquant_k3v4_nc": 0.47,
    "turboquant_3bit_nc": 0.4,
    "ultraquant_4bit": 0.54,
}
_NAMES = ("dtype", "quantization", "kv_cache_dtype")


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
    recurrent: bool = False  # whether the target may have states of recurrent layers as well

    @property
    def total(self) -> float:
        """GiB that one GPU must hold."""
        parts = (self.weights, self.head, self.kv, self.store, self.graphs, self.overhead)
        return sum(parts)

    def sum(self) -> str:
        """The sum with all its parts, as a line of text."""
        states = "; states of recurrent layers not counted" if self.recurrent else ""
        everywhere = f" on each of {self.gpus} GPUs" if self.gpus > 1 else ""
        return (
            f"weights {self.weights:.1f} + head {self.head:.1f} + KV cache {self.kv:.1f} "
            f"(one sequence of {self.length:,} tokens; {self.token_bytes:,} bytes for one more"
            f"{states})"
            f" + hidden states {self.store:.1f} + CUDA graphs {self.graphs:.1f}"
            f" + overhead {self.overhead:.1f} = {self.total:.1f} GiB{everywhere}"
        )


def _engine_arguments(settings: Settings) -> dict[str, Any]:
    """What vLLM is told of sizes and types: the settings, and `engine_args`, which win.

    Numbers that are given as text are left out: vLLM decides whether it reads them.
    """
    model, engine = settings.model, settings.engine
    theirs = {
        name: value
        for name, value in engine.engine_args.items()
        if name in _NAMES or not isinstance(value, str)
    }
    return {
        "dtype": model.dtype,
        "quantization": model.quantization,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enforce_eager": engine.enforce_eager,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "kv_cache_memory_bytes": (engine.kv_cache_gib or 0) * GIB,
        "kv_cache_dtype": "auto",
        **theirs,
    }


def capacity(settings: Settings, about: About, gpu_gib: float = H100_GIB) -> StepShape:
    """The largest step of an engine on GPUs of `gpu_gib`, on vLLM's V2 model runner. On V1 lookups
    beside a head may add some tokens."""
    gpu = server_defaults(gpu_gib)
    return step_shape(_engine_arguments(settings), gpu, *_drafting(settings, about))


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
    layers = target.layers or sum(group.layers for group in target.kv)
    head_layers = head.layers if head is not None and method is not None else 0
    return estimate_graphs(graphs_of(shape, k, method), k, method, layers, head_layers)


def need(
    settings: Settings,
    about: About,
    gpus: int | None = None,
    gpu_gib: float = H100_GIB,
    length: int | None = None,
) -> Need | None:
    """What `settings` need on each of `gpus` (default: their tensor parallel size) of `gpu_gib`,
    with a longest sequence of `length` tokens (default: theirs); None where nothing is known of the
    target."""
    target = about.target
    if target is None:
        return None
    arguments = _engine_arguments(settings)
    gpus = gpus or int(arguments["tensor_parallel_size"])
    dtype = BYTES.get(arguments["dtype"], 2)
    length = length or arguments["max_model_len"] or target.max_length
    if length == -1:
        length = SHORTEST  # vLLM takes the longest that fits (app/settings/engine.py)
    head = about.head if settings.has_head else None
    head_layers = head.layers if head else 0
    cache_dtype = arguments["kv_cache_dtype"]
    cell = dtype if cache_dtype == "auto" else KV_BYTES.get(cache_dtype, dtype)
    shape, captured = capacity(settings, about, gpu_gib), graphs(settings, about, gpu_gib)
    # vLLM lays out the next step while one runs: tokens of both are in flight.
    kv = _kv_bytes(target, head_layers, length, 2 * shape.tokens, cell, gpus)
    kept = shape.sequences * MAX_DEFERRED_STEPS
    store = kept * head.taps * target.hidden_size * dtype if head else 0
    return Need(
        weights=_weights_bytes(target, arguments["quantization"], dtype) / gpus / GIB,
        head=(head.parameters_b * 1e9 * 2 / gpus / GIB) if head else 0.0,
        kv=(arguments["kv_cache_memory_bytes"] or kv) / GIB,
        store=store / GIB,
        graphs=captured.gib if captured else 0.0,
        overhead=OVERHEAD_GIB,
        length=length,
        token_bytes=_kv_bytes(target, head_layers, 1, 0, cell, gpus, unbounded_only=True),
        gpus=gpus,
        recurrent=target.recurrent,
    )


def usable(settings: Settings, gpu_gib: float) -> float:
    """GiB of a GPU that vLLM may use. Where the size of the KV cache is given, the operator's share
    bounds nothing (vllm/v1/worker/gpu_worker.py, determine_available_memory)."""
    arguments = _engine_arguments(settings)
    share: float | None = arguments["gpu_memory_utilization"]
    if arguments["kv_cache_memory_bytes"]:
        share = None
    return gpu_gib * (share or UTILISATION)


def tensor_parallel_size(settings: Settings) -> int:
    """GPUs that the model is split over."""
    return int(_engine_arguments(settings)["tensor_parallel_size"])


def free_at_start(settings: Settings, about: About | None, gpu_gib: float) -> tuple[float, float]:
    """GiB of a GPU that must be free for vLLM to start at all, and GiB that its engine then takes.

    Both are vLLM's share of the GPU. Where the size of the KV cache is given, the share is another
    one (app/engine/configuration/options.py), and the engine takes the sum of what it needs.
    """
    arguments = _engine_arguments(settings)
    share: float | None = arguments["gpu_memory_utilization"]
    if not arguments["kv_cache_memory_bytes"]:
        wanted = gpu_gib * (share or UTILISATION)
        return wanted, wanted
    least = gpu_gib * (share or SHARE_BESIDE_KV_SIZE)
    needed = need(settings, about, None, gpu_gib) if about else None
    return least, max(least, needed.total) if needed else least


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
        needed = need(settings, about, None, gpu_gib, middle * 1024)
        if needed is not None and needed.total <= usable(settings, gpu_gib):
            low = middle
        else:
            high = middle - 1
    return low * 1024


def _weights_bytes(target: TargetFacts, quantization: str | None, dtype: int) -> float:
    if target.weights_gib is not None:
        return target.weights_gib * GIB
    quantised = QUANTISED.get(quantization or "", dtype)
    if quantization in OF_EXPERTS and not target.mixture:
        quantised = dtype
    return target.parameters_b * 1e9 * quantised


def _kv_bytes(
    target: TargetFacts,
    head_layers: int,
    length: int,
    in_flight: int,
    cell: float,
    gpus: int,
    *,
    unbounded_only: bool = False,
) -> int:
    """Bytes of KV cache on each GPU for one sequence of `length` tokens.

    A sliding layer keeps its window and the tokens in flight. The head's layers keep every token,
    and are taken to be as wide as the target's full ones.
    """
    total = 0.0
    for group in target.kv:
        if group.window is not None and unbounded_only:
            continue
        tokens = length if group.window is None else min(length, group.window + in_flight)
        total += group.layers * tokens * _width(group, cell, gpus)
    if head_layers and target.kv:
        full = next((group for group in target.kv if group.window is None), target.kv[0])
        total += head_layers * length * _width(full, cell, gpus)
    return round(total)


def _width(group: KvLayers, cell: float, gpus: int) -> float:
    """Bytes of a token on each GPU in one layer of a group. Heads are never split."""
    if group.latent:
        return group.head_dim * cell
    return 2 * -(-group.heads // gpus) * group.head_dim * cell
