"""Settings -> vLLM engine arguments. Pure: no vllm import, no side effect."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from app.engine.configuration.capacity import SIZES as CAPTURE_SIZES
from app.engine.configuration.capacity import ServerDefaults, has_whole_prompts, step_shape
from app.engine.configuration.cpu import CpuMachine
from app.settings import Settings
from drafters.config import (
    LONGEST_MATCH,
    LOOKUP_DRAFTER,
    SHORTEST_MATCH,
    DrafterConfig,
    captured_table,
)
from drafters.model.config import Method

VLLM_VERSION = "0.32.0"
# Without torchvision most of vLLM's classes of targets that read images cannot be imported, for
# text alone either. `make install` brings it for GPUs; no plain package index has a CPU's build.
TORCHVISION_FOR_A_CPU = (
    "make tools, then .venv/bin/uv pip install --python .venv/bin/python --no-deps "
    "--torch-backend=cpu torchvision==0.28.0"
)
GIB = 1024**3
CPU_KV_SHARE = 0.25
# gpu_memory_utilization where the size of the KV cache is given. vLLM then only asks at the start
# whether that share of the GPU is free (vllm/v1/worker/utils.py, request_memory), 0.92 by default.
# It takes weights that another process holds (load_format ipc_cache) off the share.
SHARE_BESIDE_KV_SIZE = 0.01
# By its full name: "uni" becomes "mp" on a CPU (vllm/platforms/cpu.py).
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# vLLM's own bounds of requests, beyond what the settings allow. They are constants: compiled models
# are kept by them, too (vllm/envs.py, compile_factors), so that a setting would compile anew. The
# request models read that of stop strings when they are imported. A word counts twice where it has
# other tokens behind a space, and a worker has a row of so many for each request.
REQUEST_BOUNDS = {"VLLM_MAX_STOP_STRINGS": str(1 << 20), "VLLM_MAX_NUM_BAD_WORDS": "1024"}
_DEFAULTS = {
    **REQUEST_BOUNDS,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # As `vllm serve` does, and vLLM itself on a CPU. By default it forks the first engine on a GPU,
    # with the locks of this process's threads, and spawns later ones: by then CUDA is initialised.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # An allowed host could redirect the gateway to one that is not allowed.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
}
_PLUGINS, _OUR_PLUGIN = "VLLM_PLUGINS", "aerie"


def set_environment(environ: MutableMapping[str, str]) -> None:
    """Set what vllm and its processes read, except what the operator has set. Call it before the
    first import of vllm, which reads a part of it.

    `VLLM_PLUGINS` names the plugins that are loaded: without this project's (pyproject.toml) vLLM
    has none of its corrections, and starts no drafter.
    """
    for name, value in _DEFAULTS.items():
        environ.setdefault(name, value)
    if _PLUGINS in environ:
        named = [name for name in environ[_PLUGINS].split(",") if name]
        environ[_PLUGINS] = ",".join(dict.fromkeys([*named, _OUR_PLUGIN]))


def engine_options(
    settings: Settings,
    cpu: CpuMachine | None = None,
    *,
    method: Method = "p-eagle",
    v2: bool = False,
    gpu: ServerDefaults | None = None,
) -> dict[str, Any]:
    """Keyword arguments for vLLM's AsyncEngineArgs (vllm/engine/arg_utils.py).

    `cpu` is given when the model runs on a CPU. vLLM's defaults there take 92% of all memory, fail
    if less is free or if there is no C++ compiler, and run the model in a process of its own, for
    which another core waits. `method` is how the head drafts (app/engine/configuration/head.py).
    `v2` is whether vLLM's V2 model runner runs it (app/engine/configuration/runner.py). `gpu` is
    what vLLM gives its own server, where the model runs on a GPU
    (app/engine/configuration/server.py).

    `engine.engine_args` is applied last, so an operator can override anything here.
    """
    model, engine = settings.model, settings.engine
    options: dict[str, Any] = {
        "model": model.model,
        "served_model_name": list(settings.model_names),
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enforce_eager": engine.enforce_eager,
        "seed": engine.seed,
        "worker_cls": "drafters.vllm.worker.DraftingWorker",
    }
    given = {
        "revision": model.revision,
        "quantization": model.quantization,
        "reasoning_parser": model.reasoning_parser,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
    }
    options.update({name: value for name, value in given.items() if value is not None})
    if engine.kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * GIB)
    elif cpu is not None:
        options["kv_cache_memory_bytes"] = int(cpu.free_memory * CPU_KV_SHARE)
    if cpu is not None and not cpu.can_compile:
        options["enforce_eager"] = True
    # app/validation/size_limits.py refuses all other hosts before vLLM does.
    if settings.limits.media_hosts:
        options["allowed_media_domains"] = sorted(settings.limits.media_hosts)
    if settings.server.otlp_traces_endpoint is not None:
        options["otlp_traces_endpoint"] = settings.server.otlp_traces_endpoint
    if settings.admission.guarded:  # keys have priorities; without keys all are equal
        options["scheduling_policy"] = "priority"
    if settings.speculates:
        options |= {
            "speculative_config": speculative_config(settings, method=method, v2=v2),
            "additional_config": drafter_config(settings, v2=v2).entry(),
            # On V1 a pass is laid out on the host, from what was accepted.
            "async_scheduling": v2,
            "scheduler_cls": "drafters.vllm.scheduling.scheduler."
            + ("AsyncDraftingScheduler" if v2 else "DraftingScheduler"),
        }
        if settings.speculation.speculation_header:
            options["per_request_spec_decode_metrics"] = "summary"
    options |= engine.engine_args
    has_kv_size = bool(options.get("kv_cache_memory_bytes"))
    if cpu is None and has_kv_size and options.get("load_format") != "ipc_cache":
        options.setdefault("gpu_memory_utilization", SHARE_BESIDE_KV_SIZE)
    if gpu is not None and settings.speculates:
        k = settings.speculation.head_k or settings.speculation.lookup_k
        head = method if settings.has_head else None
        shape = step_shape(options, gpu, k, head, lookup_k(settings, v2=v2))
        options["max_num_seqs"] = shape.sequences
        # vLLM, which knows the model's length, makes room for prompts that are read whole.
        if not has_whole_prompts(options) or (options.get("max_model_len") or 0) > 0:
            options["max_num_batched_tokens"] = shape.tokens
        if shape.sizes:
            options[CAPTURE_SIZES] = shape.sizes
    options["structured_outputs_config"] = with_one_backend(
        options.get("structured_outputs_config")
    )
    if cpu is not None and cpu.threads and all(options.get(size, 1) == 1 for size in SIZES):
        options.setdefault("distributed_executor_backend", ONE_PROCESS)
    return options


def with_one_backend(given: Any) -> Any:
    """vLLM's settings of structured output, with xgrammar where no backend is named.

    vLLM's own choice, "auto", checks each request against the backend that suits it, but runs all
    requests with the backend that suited the first one, which ignores what it does not know.
    """
    if isinstance(given, Mapping | None):
        return {"backend": "xgrammar", **(given or {})}
    if given.backend == "auto":  # read by vLLM's own parser
        given.backend = "xgrammar"
    return given


def lookup_k(settings: Settings, *, v2: bool) -> int:
    """The most draft tokens of a lookup: 0 on the V2 model runner, on which the newest tokens are
    known to the device alone."""
    return 0 if v2 else settings.speculation.lookup_k


def drafter_config(settings: Settings, *, v2: bool = False) -> DrafterConfig:
    """The configuration that drafter and scheduler read in the engine's processes."""
    speculation = settings.speculation
    on_device = v2 and not settings.has_head  # vLLM's lookup, whose K is chosen like a head's
    return DrafterConfig(
        head_tokens=None if on_device else speculation.head_k,
        lookup_tokens=lookup_k(settings, v2=v2),
        catch_up_tokens=speculation.catch_up_tokens,
        context_tokens=speculation.draft_context,
    )


def speculative_config(
    settings: Settings, *, method: Method = "p-eagle", v2: bool = False
) -> dict[str, Any]:
    """vLLM's `speculative_config`. To vLLM a P-EAGLE head is an EAGLE-3 head that drafts in one
    pass.

    vLLM would leave the last block of every cached prefix unused beside such a head, whose key at
    the block's last position was computed from the token that followed it then. One such key in a
    block changes no text, and acceptance by less than can be measured (docs/decisions/0028).
    """
    if not settings.has_head:
        return lookup_config(settings, v2=v2)
    k = settings.speculation.k
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": settings.speculation.drafter,
        "num_speculative_tokens": max(k, lookup_k(settings, v2=v2)),
        "parallel_drafting": method == "p-eagle",
        "disable_eagle_block_drop": True,
    }
    if v2:
        config["num_speculative_tokens_per_batch_size"] = captured_table(k)
    return config


def lookup_config(settings: Settings, *, v2: bool = False) -> dict[str, Any]:
    """vLLM's `speculative_config` without a head: this project's lookup on the V1 model runner, and
    on V2 vLLM's own, which runs on the device."""
    k = settings.speculation.lookup_k
    if not v2:
        return {
            "method": "custom_class",
            "model": LOOKUP_DRAFTER,
            "num_speculative_tokens": k,
        }
    return {
        "method": "ngram_gpu",
        "num_speculative_tokens": k,
        "prompt_lookup_min": SHORTEST_MATCH,
        "prompt_lookup_max": LONGEST_MATCH,
        "num_speculative_tokens_per_batch_size": captured_table(k),
    }
