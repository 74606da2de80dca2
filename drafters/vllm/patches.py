"""Patches of vLLM 0.32.0, each with the fault that it corrects. Nothing else patches vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import wraps
from importlib.metadata import entry_points
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.qwen3_eagle3 import Eagle3Qwen3ForCausalLM
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES
from vllm.triton_utils import HAS_TRITON
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker import gpu_model_runner

from drafters.config import every_k
from drafters.vllm.own_drafter import has_own_drafter, is_parallel
from drafters.vllm.v1.runner import drafting
from drafters.vllm.verification import seeded_sampling
from drafters.vllm.verification.finite import count_broken

VLLM_VERSION = "0.32.0"
_CUSTOM = "vllm.logits_processors"  # vLLM's group of installed logits processors


def apply() -> None:
    """Apply every correction once. Raises RuntimeError on any other vLLM."""
    if not vllm.__version__.startswith(VLLM_VERSION):
        raise RuntimeError(f"vllm {vllm.__version__} is installed, {VLLM_VERSION} is needed")
    load = torch.compiler.load_compiled_function
    if not hasattr(load, "__wrapped__"):
        torch.compiler.load_compiled_function = _loads_on_cpu(load)  # type: ignore[assignment]
    if rejection_sampler.rejection_sample is not seeded_sampling.accept:
        rejection_sampler.rejection_sample = seeded_sampling.accept
        kv_cache_utils.get_kv_cache_groups = head_in_one_group(kv_cache_utils.get_kv_cache_groups)
        EngineCore.aerie_speculation = speculation
        EngineCore.post_step = unless_brought(EngineCore.post_step)
        gpu_model_runner.build_logitsprocs = undrafted_parameters(build_logitsprocs)
        SpeculativeConfig.hf_config_override = staticmethod(
            with_count_of_taps(SpeculativeConfig.hf_config_override)
        )
        for head in (Eagle3LlamaForCausalLM, Eagle3Qwen3ForCausalLM):
            head.load_weights = without_idle_map(head.load_weights)
        algorithms = SUPPORTED_SPECULATORS_TYPES
        algorithms["peagle"] = with_all_norms(algorithms["peagle"])
        SamplingParams._validate_spec_decode = accept_undrafted(
            SamplingParams._validate_spec_decode
        )
        asked, on_cpu = envs.VLLM_USE_V2_MODEL_RUNNER, current_platform.is_cpu()
        if not on_cpu:
            gpu_model_runner.GPUModelRunner = drafting(gpu_model_runner.GPUModelRunner)
        elif not asked:
            from vllm.v1.worker import cpu_worker

            rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
            cpu_worker.CPUModelRunner = drafting(cpu_worker.CPUModelRunner)
        # On a GPU each configuration has its runner (VllmConfig.use_v2_model_runner): V2 for a
        # target without a head, V1 for P-EAGLE, unless the variable says which.
        if asked or (HAS_TRITON and not on_cpu):
            use_v2_model_runner()


def use_v2_model_runner() -> None:
    """Patch vLLM's V2 model runner."""
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    from drafters.vllm.v2.runner import V2DraftingRunner

    # Workers look for it there, and vllm/v1/worker/cpu/model_runner.py derives the CPU's from it.
    model_runner.GPUModelRunner = drafting(model_runner.GPUModelRunner, V2DraftingRunner)
    sampler.get_num_nans = rejection_sampler.get_num_nans = count_broken
    VllmConfig._get_v2_model_runner_unsupported_features = with_parallel_drafting(
        VllmConfig._get_v2_model_runner_unsupported_features
    )
    cudagraph_utils.build_dynamic_sd_schedule_lookup = with_every_k(
        cudagraph_utils.build_dynamic_sd_schedule_lookup
    )


def with_every_k(build: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Capture CUDA graphs for every K. vLLM takes those K from a list by batch size that ends at
    the largest batch: with 4 requests at most, `every_k`'s table would be cut at K = 3."""

    @wraps(build)
    def lookup(table: Any, vllm_max_batch_size: int, vllm_num_speculative_tokens: int) -> list[int]:
        longest = vllm_max_batch_size
        if table == every_k(vllm_num_speculative_tokens):
            longest = max(longest, len(table))
        return build(table, longest, vllm_num_speculative_tokens)

    return lookup


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


def speculation(core: Any, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A utility method added to the engine core (vllm/v1/engine/core.py), by which the gateway
    calls the scheduler's method of the same name."""
    answer: dict[str, Any] = core.scheduler.speculation(command, arguments)
    return answer


def unless_brought(post_step: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
    """Skip the engine core's call for drafts after each step if they came with the output."""

    @wraps(post_step)
    def ask(self: Any, model_executed: bool) -> None:
        if not getattr(self.scheduler, "brings_drafts", False):
            post_step(self, model_executed)

    return ask


def with_count_of_taps(override: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add the number of taps to a head's configuration. vLLM builds a Llama head without
    `num_aux_hidden_states` for three taps (model_executor/models/llama_eagle3.py): the weights of
    one with another number do not load.
    """

    @wraps(override)
    def override_and_count(hf_config: Any) -> Any:
        hf_config = override(hf_config)
        taps = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
        if taps and getattr(hf_config, "num_aux_hidden_states", None) is None:
            hf_config.num_aux_hidden_states = len(taps)
        return hf_config

    return override_and_count


def without_idle_map(load: Callable[..., Any]) -> Callable[..., Any]:
    """Load a head's weights without its map from draft to target vocabulary (`d2t`) where both are
    the same. vLLM has no parameter for it there, and stops with "no module or parameter named
    'draft_id_to_target_id'".
    """

    @wraps(load)
    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        if self.draft_id_to_target_id is None:
            weights = (entry for entry in weights if not _is_idle_map(*entry))
        return load(self, weights)

    return load_weights


def _is_idle_map(name: str, weight: torch.Tensor) -> bool:
    if name != "d2t":
        return False
    if weight.any():
        raise ValueError("d2t maps to other tokens, but the draft vocabulary is the target's")
    return True


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


def undrafted_parameters(build: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the logits processors of `logit_bias` and `min_p`, and refuse others.

    Under speculation vLLM drops them (v1/sample/logits_processor/__init__.py,
    build_logitsprocs) and refuses requests that need them. Our drafters do not draft for such
    requests (limits.py), so each has the one row of logits that the processors expect. Which
    requests a custom processor changes is not known; verified drafts would skip it.
    """

    @wraps(build)
    def build_all(
        vllm_config: Any, device: Any, pinned: bool, pooling: bool, custom: Any = ()
    ) -> Any:
        if has_own_drafter(vllm_config.speculative_config):
            named = [*map(str, custom), *(point.value for point in entry_points(group=_CUSTOM))]
            if named:
                raise ValueError(
                    f"logits processors {', '.join(named)} are not applied to drafted tokens: "
                    "serve them without a draft head"
                )
            vllm_config = copy(vllm_config)
            vllm_config.speculative_config = None
        return build(vllm_config, device, pinned, pooling, custom)

    return build_all


def accept_undrafted(check: Callable[..., None]) -> Callable[..., None]:
    """Accept requests with `logit_bias` or `min_p`, which vLLM refuses under speculation
    (vllm/sampling_params.py, _validate_spec_decode)."""

    @wraps(check)
    def check_others(self: Any, speculation: Any) -> None:
        if not has_own_drafter(speculation):
            check(self, speculation)

    return check_others


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
        # The head's layers are registered after all of the target's.
        count = speculation.draft_model_config.hf_text_config.num_hidden_layers
        head = list(kv_cache_spec)[-count:]
        if sum(not set(head).isdisjoint(group.layer_names) for group in groups) < 2:
            return groups
        specs = kv_cache_utils.unify_kv_cache_spec_page_size(kv_cache_spec)
        rest = {name: spec for name, spec in specs.items() if name not in head}
        own = kv_cache_utils.create_kv_cache_group_specs(specs, [head])
        return [*build(vllm_config, rest), *own]

    return build_groups


def _loads_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
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
