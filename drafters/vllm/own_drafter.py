"""Which draft heads this project's drafters run, and beside which options."""

from __future__ import annotations

import sys
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.transformers_utils.config import iter_rope_parameters
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

from drafters.config import LOOKUP_DRAFTER, DrafterConfig
from drafters.ops.reference import MOST_REQUESTS, MOST_TAPS

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor
# Attention backends for a P-EAGLE head on V2 where vLLM's own choice does not do, the faster first.
_OF_ANY_LENGTH = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)
_ONE_LENGTH = "Mamba or short-convolution layers of a target"
# Kinds of rotary embeddings whose tables vLLM makes as long as their own configuration says
# (vllm/model_executor/layers/rotary_embedding/__init__.py).
_YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
_TAPS = "eagle_aux_hidden_state_layer_ids"


def is_parallel(speculation: Any) -> bool:
    """Whether a vLLM SpeculativeConfig asks for a P-EAGLE head."""
    return speculation is not None and speculation.parallel_drafting and speculation.use_eagle()


def has_own_drafter(speculation: Any) -> bool:
    """Whether a drafter of this project runs the head of a vLLM SpeculativeConfig: any P-EAGLE or
    EAGLE-3 head, on either model runner."""
    return is_parallel(speculation) or (speculation is not None and speculation.method == "eagle3")


def looks_up(speculation: Any) -> bool:
    """Whether a vLLM SpeculativeConfig asks for drafts without a head, by lookup in a request's own
    text: this project's drafter on the V1 model runner, vLLM's own on V2."""
    if speculation is None:
        return False
    is_own = speculation.method == "custom_class" and speculation.model == LOOKUP_DRAFTER
    return is_own or speculation.method == "ngram_gpu"


def chooses_k(speculation: Any) -> bool:
    """Whether this project chooses K for the drafts that a vLLM SpeculativeConfig asks for."""
    return has_own_drafter(speculation) or looks_up(speculation)


def accept_undrafted(inputs: InputProcessor) -> None:
    """Let the input processor of an engine client accept requests with `logit_bias` or `min_p`,
    which vLLM refuses under speculation (vllm/sampling_params.py, _validate_spec_decode). Beside
    that only _validate_trace_replay looks at the speculative configuration there, for an option
    that no request can name. On V1 our drafters do not draft for requests with `logit_bias` or
    `min_p`; the sampler of V2 applies both to every drafted row."""
    if chooses_k(inputs.speculative_config):
        inputs.speculative_config = None


def name_taps(head: Any) -> None:
    """Give a head's configuration in vLLM the taps that an older checkpoint names in
    `eagle_config`, where V2 does not look (vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py):
    its target would give the head the states of other layers."""
    nested = (getattr(head, "eagle_config", None) or {}).get(_TAPS)
    if nested and not getattr(head, _TAPS, None):
        setattr(head, _TAPS, nested)


def longest_text(head: torch.nn.Module) -> int:
    """The most tokens of a text that a loaded head can read: as many as its shortest table of
    rotations has positions.

    vLLM makes the tables as long as the target's texts, whatever length the head was trained with
    (config/speculative.py, _maybe_override_draft_max_position_embeddings). Those of YaRN have the
    head's own length (model_executor/layers/rotary_embedding/yarn_scaling_rope.py)."""
    tables = (getattr(module, "cos_sin_cache", None) for module in head.modules())
    return min((len(table) for table in tables if table is not None), default=sys.maxsize)


def _yarn_positions(head: Any) -> int:
    """The positions that YaRN gives a head by its configuration, `sys.maxsize` without YaRN."""
    return min(
        (
            int(rope["original_max_position_embeddings"] * rope["factor"])
            for rope in iter_rope_parameters(head)
            if rope.get("rope_type") in _YARN
        ),
        default=sys.maxsize,
    )


def refuse(config: VllmConfig) -> None:
    """Check that this project's drafter can draft beside the other options of a configuration.
    Raises NotImplementedError, which names those that it cannot. A configuration without a drafter
    of this project passes. Options that the gateway refuses in any case, such as adapters, are not
    looked at (app/settings/engine.py)."""
    speculation, model, parallel = (
        config.speculative_config, config.model_config, config.parallel_config
    )  # fmt: skip
    on_v1 = not config.use_v2_model_runner
    if looks_up(speculation):
        _refuse_lookup(config, on_v1)
    if not has_own_drafter(speculation):
        return
    either = {
        **_unfit_for_lookups(config, on_v1),
        "M-RoPE": model.uses_mrope or speculation.draft_model_config.uses_mrope,
        # The blocks that come from elsewhere lack the head's keys.
        "KV cache transfer (kv_transfer_config, kv_offloading_size)": (
            config.kv_transfer_config is not None
        ),
        # Our drafters propose tokens without their distribution; vLLM's own speculator drafts with
        # an EAGLE-3 head on V2.
        "probabilistic drafts (draft_sample_method)": speculation.draft_sample_method != "greedy"
        and (on_v1 or is_parallel(speculation)),
        # Sampled tokens come as a tensor only in padded batches.
        "disable_padded_drafter_batch": speculation.disable_padded_drafter_batch,
        # An entry of a block table stands for a block on each rank: more tokens than in a block.
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
    }
    if named := _asked(either):
        lookups_do = not _asked(_unfit_for_lookups(config, on_v1))
        remedy = ": leave out --drafter for drafts by lookup" if lookups_do else ""
        raise NotImplementedError(f"draft heads do not draft with {named}{remedy}")
    if on_v1:
        return
    head = speculation.draft_model_config.hf_config
    name_taps(head)
    taps = getattr(head, _TAPS, None) or ()
    only_v1 = {
        "draft_context": DrafterConfig.read(config.additional_config).context_tokens > 0,
        # vLLM frees blocks behind the window, and puts layers of two kinds into two groups.
        "sliding-window layers of a head": "sliding_attention"
        in (getattr(head, "layer_types", None) or ()),
        f"more than {MOST_TAPS} taps of a head": len(taps) > MOST_TAPS,
        f"more than {MOST_REQUESTS:,} requests at once (max_num_seqs)": (
            config.scheduler_config.max_num_seqs > MOST_REQUESTS
        ),
        _ONE_LENGTH: _is_captured_at_one_length(model),
        "texts beyond the positions of a head with YaRN (max_model_len)": (
            _yarn_positions(head) < model.max_model_len
        ),
    }
    if named := _asked(only_v1):
        raise NotImplementedError(
            f"draft heads on the V2 model runner have no {named}: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    head_backend(config)


def _is_captured_at_one_length(model: ModelConfig) -> bool:
    """Whether vLLM captures the decode steps of a target at 1 + K tokens of a request and at no
    other length, K the largest (vllm/v1/attention/backends/mamba_attn.py,
    build_for_cudagraph_capture). On V2 there are graphs for several K. Gated delta nets, whose
    configurations name `linear_conv_kernel_dim`, are captured at any length."""
    recurrent = model.is_hybrid or model.is_attention_free
    return recurrent and not hasattr(model.hf_text_config, "linear_conv_kernel_dim")


def _refuse_lookup(config: VllmConfig, on_v1: bool) -> None:
    """Check that lookups can draft beside the other options of a configuration. Raises
    NotImplementedError, which names those that they cannot."""
    options = _unfit_for_lookups(config, on_v1)
    one_length = not on_v1 and _is_captured_at_one_length(config.model_config)
    options[f"{_ONE_LENGTH} on the V2 model runner"] = one_length
    if named := _asked(options):
        raise NotImplementedError(f"lookups do not draft with {named}")


def _unfit_for_lookups(config: VllmConfig, on_v1: bool) -> dict[str, bool]:
    """The options beside which neither a head nor lookups draft -> whether the configuration has
    them."""
    model, parallel = config.model_config, config.parallel_config
    method = config.speculative_config.rejection_sample_method
    return {
        # Ranks of such a target wait for each other in every pass (vllm/v1/worker/dp_utils.py,
        # coordinate_batch_across_dp), and each rank chooses its own K. Ranks of a dense target are
        # engines of their own (vllm/v1/engine/core.py, run_engine_core).
        "data parallelism of a mixture of experts": (
            parallel.data_parallel_size > 1 and model.is_moe
        ),
        # Its stages but the last have no drafter, and look for it in each step
        # (vllm/v1/worker/gpu_model_runner.py, _build_attention_metadata).
        "pipeline parallelism on the V1 model runner": on_v1
        and parallel.pipeline_parallel_size > 1,
        # Drafts are laid out on the host, which must know the accepted tokens.
        "async_scheduling on the V1 model runner": on_v1
        and config.scheduler_config.async_scheduling,
        "block verification (rejection_sample_method) on the V1 model runner": on_v1
        and method == "block",
    }


def head_backend(config: VllmConfig) -> AttentionBackendEnum | None:
    """The attention backend that a P-EAGLE head needs on the V2 model runner, None where the one
    that vLLM chooses for it will do.

    The pass has up to 2 K tokens of each request. A backend whose metadata parts decodes from
    prompts by their length, as FlashInfer's does, takes K + 1 tokens for a decode
    (vllm/v1/attention/backend.py, max_decode_query_len): such a pass has no full CUDA graph, and
    waits for the device to know its lengths. Raises NotImplementedError if the configuration asks
    for such a backend, or if there is no other."""
    speculation = config.speculative_config
    if not is_parallel(speculation) or speculation.num_speculative_tokens == 1:
        return None
    chosen = _backend(config)
    if _takes_any_length(chosen):
        return None
    if speculation.attention_backend is None:
        for other in _OF_ANY_LENGTH:
            try:
                if _takes_any_length(_backend(config, other)):
                    return other
            except ValueError:  # not for this device, type or head size
                continue
    most = 1 + speculation.num_speculative_tokens
    raise NotImplementedError(
        f"the attention backend {chosen.get_name()} decodes at most {most} tokens of a request at "
        f"once, a P-EAGLE head needs {2 * (most - 1)}: set attention_backend in speculative_config "
        f"to {' or '.join(backend.name for backend in _OF_ANY_LENGTH)}"
    )


def limits_of(config: VllmConfig) -> list[str]:
    """What this project's drafter will do otherwise than vLLM's configuration says, a sentence
    each; for the log, before anything is loaded. Raises NotImplementedError as `refuse` does."""
    refuse(config)
    other = head_backend(config) if config.use_v2_model_runner else None
    if other is None:
        return []
    k = config.speculative_config.num_speculative_tokens
    return [
        f"The draft head's attention runs on {other.name}: a pass of P-EAGLE has up to {2 * k} "
        f"tokens of a request, and {_backend(config).get_name()} decodes at most {1 + k} at once."
    ]


def _backend(
    config: VllmConfig, backend: AttentionBackendEnum | None = None
) -> type[AttentionBackend]:
    """The attention backend of the head's layers, if the configuration asks for `backend`.
    Raises ValueError if that is not for this device."""
    speculation, config = config.speculative_config, copy(config)
    config.attention_config = copy(config.attention_config)
    asked = backend or speculation.attention_backend
    config.attention_config.backend = asked or config.attention_config.backend
    with set_current_vllm_config(config):
        return get_attn_backend(
            speculation.draft_model_config.get_head_size(),
            config.model_config.dtype,
            speculation.kv_cache_dtype or config.cache_config.cache_dtype,
        )


def _takes_any_length(backend: type[AttentionBackend]) -> bool:
    return backend.get_builder_cls().reorder_batch_threshold is None


def _asked(options: dict[str, bool]) -> str:
    return ", ".join(name for name, asked in options.items() if asked)
