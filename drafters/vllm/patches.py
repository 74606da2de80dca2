"""Patches of vLLM 0.32.0, each with the fault that it corrects. Nothing else patches vLLM. They are
listed in hooks.py, with the methods that subclasses override."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.models import ModelRegistry, registry
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.speculators.algos import (
    SUPPORTED_SPECULATORS_TYPES,
    register_speculator,
)
from vllm.triton_utils import HAS_TRITON
from vllm.utils import cpu_resource_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.sample import rejection_sampler, sampler

from drafters.config import captured_table
from drafters.machine import inactive_page_cache
from drafters.vllm.hooks import broken
from drafters.vllm.own_drafter import has_own_drafter, is_parallel
from drafters.vllm.verification import seeded_sampling
from drafters.vllm.verification.finite import count_broken

VLLM_VERSION = "0.32.0"
# Commands of the gateway about the draft head -> methods of the workers, one after the other.
HEAD_COMMANDS = {
    "stage": ("aerie_stage_head", "aerie_stage_selector"),
    "swap": ("aerie_swap_head",),
    "drop": ("aerie_drop_head",),
}
# Architectures that checkpoints of draft heads name (vllm/model_executor/models/registry.py) -> the
# class in heads.py for it. The module is imported when a head is loaded.
HEADS = {
    **dict.fromkeys(
        (
            "PEagleDraftModel",
            "PeagleLlamaForCausalLM",
            "Eagle3LlamaForCausalLM",
            "Eagle3MiniMaxM2ForCausalLM",
            "LlamaForCausalLMEagle3",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
        ),
        "Eagle3LlamaForCausalLM",
    ),
    **dict.fromkeys(("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM"), "Eagle3Qwen3ForCausalLM"),
}


def apply() -> None:
    """Apply every correction once. Raises RuntimeError on any other vLLM, which names the hooks
    that it breaks."""
    if rejection_sampler.rejection_sample is seeded_sampling.accept:
        return
    expected = vllm.__version__.startswith(VLLM_VERSION)
    faults = list(broken(loaded_only=expected))
    if faults or not expected:
        installed = f"vllm {vllm.__version__} is installed, {VLLM_VERSION} is needed"
        raise RuntimeError("; ".join([installed, *(faults or ["every hook fits it"])]))
    rejection_sampler.rejection_sample = seeded_sampling.accept
    kv_cache_utils.get_kv_cache_groups = head_in_one_group(kv_cache_utils.get_kv_cache_groups)
    EngineCore.aerie_speculation = speculation
    EngineCore.aerie_head = head
    EngineCore.post_step = unless_brought(EngineCore.post_step)
    VllmConfig._get_v2_model_runner_unsupported_features = with_parallel_drafting(
        VllmConfig._get_v2_model_runner_unsupported_features
    )
    register_speculator("peagle")(with_all_norms(SUPPORTED_SPECULATORS_TYPES["peagle"]))
    for architecture, name in HEADS.items():
        ModelRegistry.register_model(architecture, f"drafters.vllm.heads:{name}")
    if current_platform.is_cpu():
        registry._run_in_subprocess = inspect_in_process
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        sampler.batched_count_greater_than = count_greater_than
        cpu_resource_utils.get_cgroup_memory_usage = without_page_cache(
            cpu_resource_utils.get_cgroup_memory_usage
        )
        torch.compiler.load_compiled_function = loads_on_cpu(torch.compiler.load_compiled_function)
    if current_platform.is_cuda():
        hide_unusable_flashinfer()
        patch_flash_attention()
    if HAS_TRITON:  # which vLLM's V2 model runner needs
        patch_v2_model_runner()


def hide_unusable_flashinfer() -> None:
    """Make `import flashinfer` fail in this process where its kernels cannot be used, as if it were
    not installed, which vLLM allows for.

    They are compiled at first use, by an nvcc that may be missing. vLLM asks `has_flashinfer` for
    most of them. It does not for attention, where FlashInfer comes first on Blackwell
    (vllm/platforms/cuda.py, _get_backend_priorities), for the prefill of MLA, nor for its
    all-reduce: they take FlashInfer if it can be imported. Where it cannot, vLLM takes the next
    attention backend that fits, FlashAttention or Triton's, and refuses FlashInfer by name.
    """
    from vllm.utils.flashinfer import has_flashinfer

    if not has_flashinfer():
        sys.modules["flashinfer"] = None  # type: ignore[assignment] # Python's mark of such a module


def patch_flash_attention() -> None:
    """Patch vLLM's choice of FlashAttention."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    supports = FlashAttentionBackend.supports_head_size.__func__  # type: ignore[attr-defined]
    FlashAttentionBackend.supports_head_size = classmethod(with_version_of_head_size(supports))


def with_version_of_head_size(supports: Callable[..., bool]) -> Callable[..., bool]:
    """Take FlashAttention for heads of more than 256 only where its version 4 computes them. On
    Blackwell vLLM computes those with version 2 (vllm/v1/attention/backends/fa_utils.py), which has
    no such kernel, and offers them all the same as version 4 is there: Gemma 4's full attention
    would stop the start. The next attention backend, Triton's, has them."""

    @wraps(supports)
    def supports_head_size(cls: Any, head_size: int) -> bool:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        if not supports(cls, head_size):
            return False
        return head_size <= 256 or get_flash_attn_version(head_size=head_size) == 4

    return supports_head_size


def patch_v2_model_runner() -> None:
    """Patch what the workers of vLLM's V2 model runner use."""
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import cudagraph_utils as of_heads

    sampler.get_num_nans = rejection_sampler.get_num_nans = count_broken
    cudagraph_utils.build_dynamic_sd_schedule_lookup = with_captured_ks(
        cudagraph_utils.build_dynamic_sd_schedule_lookup
    )
    of_heads.build_dynamic_sd_schedule_lookup = with_captured_ks(
        of_heads.build_dynamic_sd_schedule_lookup
    )
    CudaGraphManager._init_candidates = with_graphs_of_each_k(CudaGraphManager._init_candidates)


def with_captured_ks(build: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Capture CUDA graphs for all of `captured_ks`. vLLM takes those K from a list by batch size
    that ends at the largest batch: with 4 requests at most, the table would be cut at K = 3."""

    @wraps(build)
    def lookup(table: Any, vllm_max_batch_size: int, vllm_num_speculative_tokens: int) -> list[int]:
        longest = vllm_max_batch_size
        if table == captured_table(vllm_num_speculative_tokens):
            longest = max(longest, len(table))
        return build(table, longest, vllm_num_speculative_tokens)

    return lookup


def with_graphs_of_each_k(build: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a step find the smallest CUDA graph that has the tokens of its own K. vLLM offers it
    those of one number of tokens, the next larger one that has a graph of any K: 5 requests at
    K = 2 (15 tokens) are offered the graphs of 16 tokens, none of which has 3 tokens of each
    request, and not the one of 18."""

    @wraps(build)
    def init_candidates(self: Any) -> None:
        build(self)
        of_width: dict[tuple[int, int], list[Any]] = {}  # smallest first
        for graph in reversed(self._capture_descs.get(CUDAGraphMode.FULL, [])):
            if graph.uniform_token_count is not None:
                key = graph.uniform_token_count, graph.num_active_loras
                of_width.setdefault(key, []).append(graph)
        for (tokens, loras), offered in self._candidates.items():
            others = [each for each in offered if each.uniform_token_count is None]
            whole = []
            for (_, of_loras), graphs in of_width.items():
                if of_loras == loras:
                    fitting = graphs[bisect_left(graphs, tokens, key=attrgetter("num_tokens")) :]
                    whole += [g for g in fitting if g.num_tokens == fitting[0].num_tokens]
            self._candidates[tokens, loras] = whole + others

    return init_candidates


def with_parallel_drafting(named: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    """Take parallel drafting off vLLM's list of what its V2 model runner lacks, if
    VLLM_USE_V2_MODEL_RUNNER asks for that runner: ours has it. By itself vLLM takes V1 for P-EAGLE.
    """

    @wraps(named)
    def lacking(self: Any) -> list[str]:
        rest = named(self)
        if not envs.VLLM_USE_V2_MODEL_RUNNER or not is_parallel(self.speculative_config):
            return rest
        return [feature for feature in rest if not feature.startswith("parallel drafting")]

    return lacking


def inspect_in_process(inspect: Callable[[], Any]) -> Any:
    """Inspect a model's class in this process.

    vLLM inspects each architecture that it has not seen before in a new process, so that CUDA is
    not initialised in its own. That process imports all of vLLM, which takes about ten seconds. On
    a CPU there is no CUDA to keep out of this process.
    """
    return inspect()


def expand_batch_to_tokens(
    x: torch.Tensor,  # [batch]
    cu_num_tokens: torch.Tensor,  # [batch], inclusive prefix sums of tokens per request
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens: `[num_tokens]`.

    vLLM's CPU kernel writes into an int64 copy of the result and drops it
    (vllm/utils/cpu_triton_utils.py, _expand_kernel_impl), so that temperature, top_k and
    top_p of every batch with a sampled request are uninitialised memory: greedy requests
    change their text beside sampled ones, and a seed does not repeat.
    """
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return values.repeat_interleave(counts.long(), output_size=num_tokens)


def count_greater_than(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Count the elements of each row of `x`, `[batch, vocabulary]`, that are not less than the
    row's one in `values`, `[batch, 1]`: the rank of a token's log probability.

    vLLM compiles this function at its first call (vllm/v1/sample/ops/logprobs.py), which holds all
    requests for 2.5 to 20 s on a CPU. Counting by numpy takes half the time of the compiled one,
    and copies no row, which `sum` would.
    """
    return torch.tensor([np.count_nonzero(row) for row in (x >= values).numpy()])


def speculation(core: Any, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A utility method added to the engine core (vllm/v1/engine/core.py), by which the gateway
    calls the scheduler's method of the same name."""
    answer: dict[str, Any] = core.scheduler.speculation(command, arguments)
    return answer


def head(core: Any, command: str, name: str) -> dict[str, Any]:
    """A utility method added to the engine core (vllm/v1/engine/core.py), by which the gateway
    replaces the draft head between two steps (head_swap.py). `command` is one of HEAD_COMMANDS,
    `name` the head's folder. Answers with the `seconds` that it took, or with `error` if a rank
    refused the head; a raised error would pass for one that ends the engine. A head that one rank
    refuses to stage stays on none: the next time all of them would have to stage it together, as
    they read the target's embeddings.
    """
    seconds = 0.0
    for method in HEAD_COMMANDS[command]:
        ranks = core.model_executor.collective_rpc(method, args=(name,))
        answers = [answer for answer in ranks if answer is not None]
        errors = sorted({answer["error"] for answer in answers if "error" in answer})
        if errors or not answers:
            if command == "stage":
                core.model_executor.collective_rpc("aerie_drop_head", args=(name,))
            return {"error": "; ".join(errors) or "the engine has no draft head of this project"}
        seconds += max(answer["seconds"] for answer in answers)
    return {"seconds": seconds}


def unless_brought(post_step: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
    """Skip the engine core's call for drafts after each step if they came with the output."""

    @wraps(post_step)
    def ask(self: Any, model_executed: bool) -> None:
        if not getattr(self.scheduler, "brings_drafts", False):
            post_step(self, model_executed)

    return ask


def with_all_norms(update: Callable[..., None]) -> Callable[..., None]:
    """Keep `fc_norm` and `norm_output` of the speculators library's P-EAGLE configurations. vLLM
    reads them for EAGLE-3 alone (transformers_utils/configs/speculators/algos.py, update_peagle).
    """

    @wraps(update)
    def update_all(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
        update(config_dict=config_dict, pre_trained_config=pre_trained_config)
        for key in ("fc_norm", "norm_output"):
            if config_dict.get(key) is not None:
                pre_trained_config[key] = config_dict[key]

    return update_all


def head_in_one_group(build: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Put the head's layers into one KV cache group, and so under one block table.

    For a target with several kinds of attention vLLM cuts the layers of each kind into groups of
    one size (vllm/v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size). If the
    head's layers make full attention half as large again as the other kind, or are more than that
    size, they land in several groups and the engine stops: "All drafting layers should belong to
    the same kv cache group". Then they get a group of their own.
    """

    @wraps(build)
    def build_groups(vllm_config: Any, kv_cache_spec: dict[str, Any]) -> list[Any]:
        groups = build(vllm_config, kv_cache_spec)
        speculation = vllm_config.speculative_config
        if not has_own_drafter(speculation):
            return groups
        # The head's layers are registered after all of the target's and numbered on from them. A
        # pipeline's stages but the last have none.
        count = speculation.draft_model_config.hf_text_config.num_hidden_layers
        of_target = vllm_config.model_config.get_total_num_hidden_layers()
        last = list(kv_cache_spec)[-count:]
        head = [name for name in last if extract_layer_index(name) >= of_target]
        if sum(not set(head).isdisjoint(group.layer_names) for group in groups) < 2:
            return groups
        specs = kv_cache_utils.unify_kv_cache_spec_page_size(kv_cache_spec)
        rest = {name: spec for name, spec in specs.items() if name not in head}
        own = kv_cache_utils.create_kv_cache_group_specs(specs, [head])
        return [*build(vllm_config, rest), *own]

    return build_groups


def loads_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """Load compiled models that the CPU backend saved; else every start compiles. After loading,
    vLLM calls `finalize_loading` (vllm/compilation/decorators.py, _try_load_aot_compiled_fn), which
    only its own GPU compiler's artefacts have. On a CPU the artefact is inductor's plain function,
    complete as loaded.
    """

    @wraps(load)
    def load_and_complete(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda _config: None
        return loaded

    return load_and_complete


def without_page_cache(usage: Callable[[], int | None]) -> Callable[[], int | None]:
    """Leave inactive page cache out of what a container has in use. vLLM counts it, and refuses a
    KV cache that would fit: weights that were downloaded or read fill the container's limit with it
    (vllm/v1/worker/cpu_worker.py, determine_available_memory)."""

    @wraps(usage)
    def in_use() -> int | None:
        usage_bytes = usage()
        return None if usage_bytes is None else max(0, usage_bytes - inactive_page_cache())

    return in_use
