"""The places where this project's code takes the place of vLLM's, each with what vLLM must have
there. A release of vLLM that changes one of them is noticed here, by the name of the hook.

docs/vllm-hooks.md is made from this table, and `python -m drafters.vllm.hooks` checks it. Options
and registries of vLLM (`worker_cls`, `scheduler_cls`, plugins, models, speculators) are no hooks:
they are meant for it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hook:
    """Something of this project in the place of functions or methods of vLLM."""

    ours: str  # "module:name" within drafters.vllm, of a function or of a subclass
    # "module:name" of vLLM's function or method -> its parameters, as `parameters` writes them.
    # None where vLLM has no such name: it is added.
    targets: dict[str, str | None]
    why: str  # what is different from vLLM's own
    until: str  # the change of vLLM that makes it superfluous

    @property
    def kind(self) -> str:
        """ "patch": vLLM's code is replaced in the process. "private" and "public": methods of that
        kind are overridden in a subclass that vLLM is told to use."""
        if self.ours.partition(":")[2].lstrip("_")[0].islower():
            return "patch"
        names = [target.rpartition(".")[2] for target in self.targets]
        private = any(name.startswith("_") and not name.startswith("__") for name in names)
        return "private" if private else "public"


_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:"
_LLAMA = "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM."
_QWEN3 = "vllm.model_executor.models.qwen3_eagle3:Eagle3Qwen3ForCausalLM."
PUBLIC = "nothing to change: a subclass is what vLLM expects here"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "patches:speculation",
        {"vllm.v1.engine.core:EngineCore.aerie_speculation": None},
        "Carries the gateway's commands to the scheduler, as a utility call of the engine core.",
        "A utility call of vLLM that reaches a method of the class named by `scheduler_cls`.",
    ),
    Hook(
        "patches:head",
        {"vllm.v1.engine.core:EngineCore.aerie_head": None},
        "Carries the gateway's commands about the draft head to the workers, as a utility call of "
        "the engine core, in one turn and with refusals as answers.",
        "A `collective_rpc` of vLLM that answers for every engine core, and in which a worker may "
        "refuse.",
    ),
    Hook(
        "patches:unless_brought",
        {"vllm.v1.engine.core:EngineCore.post_step": "self, model_executed"},
        "Drafts come with a step's output; vLLM asks the workers for them in a second round trip.",
        "A field for draft tokens in `ModelRunnerOutput`.",
    ),
    Hook(
        "patches:head_in_one_group",
        {"vllm.v1.core.kv_cache_utils:get_kv_cache_groups": "vllm_config, kv_cache_spec"},
        "Keeps the head's layers under one block table beside a model with several kinds of "
        "attention, where vLLM spreads them and stops.",
        "vLLM puts the layers of a draft model into a KV cache group of their own.",
    ),
    Hook(
        "patches:with_parallel_drafting",
        {"vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features": "self"},
        "vLLM refuses P-EAGLE on its V2 model runner, where this project has a speculator for it.",
        "P-EAGLE in vLLM's own V2 speculators, or a registry of speculators by method.",
    ),
    Hook(
        "patches:with_captured_ks",
        {
            f"vllm.v1.worker.gpu.{module}cudagraph_utils:build_dynamic_sd_schedule_lookup": (
                "num_speculative_tokens_per_batch_size, vllm_max_batch_size, "
                "vllm_num_speculative_tokens"
            )
            for module in ("", "spec_decode.target_dependent_ar.")
        },
        "vLLM captures CUDA graphs only for K that its table names up to the largest batch.",
        "An option that lists the K for which graphs are captured.",
    ),
    Hook(
        "patches:with_graphs_of_each_k",
        {"vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates": "self"},
        "vLLM offers a step the CUDA graphs of one number of tokens, of which its K may have none, "
        "where a larger one of its K would fit.",
        "`_init_candidates` groups graphs by `uniform_token_count` too.",
    ),
    Hook(
        "verification.finite:count_broken",
        {
            "vllm.v1.worker.gpu.sample.sampler:get_num_nans": "logits",
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:get_num_nans": "logits",
        },
        "Finds infinity in logits too, on vLLM's V2 model runner.",
        "vLLM counts whatever is not finite.",
    ),
    Hook(
        "verification.seeded_sampling:accept",
        {
            "vllm.v1.sample.rejection_sampler:rejection_sample": (
                "draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, "
                "draft_probs, target_logits, bonus_token_ids, sampling_metadata, synthetic_mode=, "
                "synthetic_conditional_rates=, use_fp64_gumbel="
            )
        },
        "The text of a seeded request does not depend on what was drafted, on the V1 model runner; "
        "and synthetic acceptance works on a CPU.",
        "the end of the V1 model runner: on V2 it is `PositionRejectionSampler`.",
    ),
    Hook(
        "patches:expand_batch_to_tokens",
        {
            "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
                "x, cu_num_tokens, num_tokens, replace_from=, replace_to="
            )
        },
        "On a CPU vLLM's kernel drops its result: sampled requests read memory that nothing wrote.",
        "`_expand_kernel_impl` (vllm/utils/cpu_triton_utils.py) copies its result back, as "
        "`_rejection_random_sample_kernel_impl` does.",
    ),
    Hook(
        "patches:count_greater_than",
        {"vllm.v1.sample.sampler:batched_count_greater_than": "x, values"},
        "On a CPU vLLM compiles this function at the first request with log probabilities, which "
        "stalls every stream for seconds.",
        "vLLM compiles it in its warm-up, or not at all on a CPU.",
    ),
    Hook(
        "patches:with_version_of_head_size",
        {
            "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend.supports_head_size": (
                "head_size"
            )
        },
        "On Blackwell without FlashInfer vLLM takes FlashAttention for heads of 512, which the "
        "version that it computes them with does not have.",
        "`supports_head_size` asks `get_flash_attn_version` for the version of that size.",
    ),
    Hook(
        "patches:without_page_cache",
        {"vllm.utils.cpu_resource_utils:get_cgroup_memory_usage": ""},
        "In a container with a memory limit vLLM counts inactive page cache as memory in use, and "
        "refuses a KV cache that would fit.",
        "`get_cgroup_memory_usage` leaves out `inactive_file` of memory.stat.",
    ),
    Hook(
        "patches:inspect_in_process",
        {"vllm.model_executor.models.registry:_run_in_subprocess": "fn"},
        "On a CPU a model's class is inspected in the process that asks. vLLM starts another one "
        "for each new architecture, which takes about ten seconds.",
        "`_run_in_subprocess` calls the function itself where the platform has no CUDA.",
    ),
    Hook(
        "patches:loads_on_cpu",
        {"torch.compiler:load_compiled_function": "file, *, f_globals=, external_data="},
        "On a CPU vLLM calls a step of loading that only its GPU compiler's artefacts have: every "
        "start compiles.",
        "`_try_load_aot_compiled_fn` (vllm/compilation/decorators.py) calls `finalize_loading` "
        "only where there is one.",
    ),
    Hook(
        "worker:DraftingWorker",
        {"vllm.v1.worker.gpu_worker:Worker._make_model_runner": "self"},
        "Makes this project's model runners. vLLM's docstring says that subclasses override it.",
        "a public name.",
    ),
    Hook(
        "worker:DraftingWorker",
        {"vllm.v1.worker.cpu_worker:CPUWorker.init_device": "self"},
        "Makes this project's model runner on a CPU, in the place of vLLM's.",
        "`CPUWorker.init_device` calls `_make_model_runner`, as the GPU's does.",
    ),
    Hook(
        "v1.runner:V1DraftingRunner",
        {
            _V1 + "_sample": "self, logits, spec_decode_metadata",
            _V1 + "_bookkeeping_sync": (
                "self, scheduler_output, sampler_output, logits, hidden_states, "
                "num_scheduled_tokens"
            ),
        },
        "Samples seeded requests by position and verifies greedy batches by one argmax; reports "
        "logits that are not finite by request.",
        "the end of the V1 model runner.",
    ),
    Hook(
        "v1.runner:V1DraftingRunner",
        {
            _V1 + "_calc_spec_decode_metadata": ("self, num_draft_tokens, cu_num_scheduled_tokens"),
            _V1 + "_input_fits_in_drafter": "self, common_attn_metadata",
        },
        "A step without drafts skips the rejection sampler; a request near the largest length does "
        "not keep the others from being drafted for.",
        "the end of the V1 model runner.",
    ),
    Hook(
        "v1.runner:V1DraftingRunner",
        {
            _V1 + "__init__": "self, vllm_config, device",
            _V1 + "get_kv_cache_spec": "self",
            _V1 + "initialize_kv_cache": (
                "self, kv_cache_config, is_profiling=, kv_cache_allocation_context="
            ),
            _V1 + "execute_model": "self, scheduler_output, intermediate_tensors=",
            _V1 + "sample_tokens": "self, grammar_output",
            _V1 + "propose_draft_token_ids": (
                "self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, "
                "sample_hidden_states, aux_hidden_states, spec_decode_metadata, "
                "common_attn_metadata, slot_mappings"
            ),
        },
        "Drafts with this project's drafter, and times it.",
        PUBLIC,
    ),
    Hook(
        "v1.drafter:Drafter",
        {
            "vllm.v1.spec_decode.eagle:EagleProposer.__init__": (
                "self, vllm_config, device, runner="
            ),
            "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model": (
                "self, target_model"
            ),
        },
        "Lays out passes for any K, and catches up after steps without drafts.",
        PUBLIC,
    ),
    Hook(
        "v1.bf16_head:HalfLinearMethod",
        {
            "vllm.model_executor.layers.linear:"
            "UnquantizedLinearMethod.process_weights_after_loading": "self, layer"
        },
        "A float32 head multiplies in bfloat16 on a CPU where that is faster.",
        PUBLIC,
    ),
    Hook(
        "heads:_Corrections",
        {
            _LLAMA + "__init__": "self, *, vllm_config, prefix=",
            _QWEN3 + "__init__": "self, *, vllm_config, prefix=",
        },
        "Builds a Llama head for as many taps as its configuration names.",
        "`llama_eagle3.LlamaModel` reads `eagle_aux_hidden_state_layer_ids` of the configuration "
        "itself, as `qwen3_eagle3` does.",
    ),
    Hook(
        "heads:_Corrections",
        {_LLAMA + "load_weights": "self, weights", _QWEN3 + "load_weights": "self, weights"},
        "Loads heads that name a map of the vocabulary although they have all of it.",
        "vLLM's loaders skip `d2t` where the head has no parameter for it.",
    ),
    Hook(
        "v2.runner:V2DraftingRunner",
        {
            _V2 + "__init__": "self, vllm_config, device",
            _V2 + "load_model": "self, load_dummy_weights=, *args, model=, **kwargs",
            _V2 + "execute_model": (
                "self, scheduler_output, intermediate_tensors=, dummy_run=, "
                "skip_attn_for_dummy_run=, is_profile=, context_len=, valid_dummy_state_slots=, "
                "randomize_inputs="
            ),
            _V2 + "sample": "self, hidden_states, input_batch, grammar_output",
            _V2 + "sample_tokens": "self, grammar_output",
            _V2 + "add_requests": "self, scheduler_output",
        },
        "Has this project's speculators, times them, and reports logits that are not finite by "
        "request.",
        PUBLIC,
    ),
    Hook(
        "v2.timing:TimedOutput",
        {"vllm.v1.outputs:AsyncModelRunnerOutput.get_output": "self"},
        "Brings the seconds of the step before with a step's output, without waiting for them.",
        PUBLIC,
    ),
    Hook(
        "v2.rejection_sampler:PositionRejectionSampler",
        {
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify": (
                "self, logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, "
                "idx_mapping_np, expanded_idx_mapping, expanded_local_pos, "
                "seq_lens_upper_bound_np, verify_draft_sampled"
            ),
        },
        "Accepts a draft if it is the token that would be sampled in its place: the text of a "
        "seeded request does not depend on what was drafted, and drafts may know the position's "
        "noise.",
        "vLLM has a rejection sampling method that compares drafts with the sampled token.",
    ),
    Hook(
        "v2.rejection_sampler:PositionRejectionSampler",
        {
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__init__": (
                "self, sampler, spec_config, device, *, watermark_key="
            ),
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__": (
                "self, logits, input_batch, draft_logits=, invalid_drafts="
            ),
        },
        "Rejects the draft tokens beyond a request's limit, whose batch so stays in a CUDA graph.",
        PUBLIC,
    ),
    Hook(
        "v2.deferring:DeferringSpeculator",
        {
            _SPECULATOR + "DraftModelSpeculator.__init__": "self, vllm_config, device",
            _SPECULATOR + "DraftModelSpeculator.load_draft_model": (
                "self, target_model, target_attn_layer_names"
            ),
            _SPECULATOR + "DraftModelSpeculator.set_attn": (
                "self, model_state, kv_cache_config, block_tables, target_input_buffers, "
                "target_attn_groups"
            ),
        },
        "Keeps the hidden states of steps at K = 0, and enters them together.",
        PUBLIC,
    ),
    Hook(
        "v2.sequential:SequentialSpeculator",
        {
            "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:"
            "TargetDependentARSpeculator.propose": (
                "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, "
                "aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, "
                "temperature, seeds, dp_sync_state=, dummy_run=, skip_attn_for_dummy_run=, "
                "mm_inputs=, is_profile=, num_speculative_tokens="
            ),
            _SPECULATOR + "DraftModelSpeculator.sample_draft": (
                "self, hidden_states, sample_src_positions, idx_mapping, temperature, seeds, "
                "draft_step, draft_logits, spec_step_idx="
            ),
        },
        "Drafts with EAGLE-3 as vLLM does, but puts its pass at K = 0 off.",
        PUBLIC,
    ),
    Hook(
        "v2.lookup:LookupSpeculator",
        {
            "vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator.propose": (
                "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, "
                "aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, "
                "temperature, seeds, dp_sync_state=, dummy_run=, skip_attn_for_dummy_run=, "
                "mm_inputs=, is_profile=, num_speculative_tokens="
            ),
        },
        "Looks up as vLLM does, but runs no kernel at K = 0.",
        PUBLIC,
    ),
    Hook(
        "v2.speculator:ParallelSpeculator",
        {
            _SPECULATOR + "DraftModelSpeculator.__init__": "self, vllm_config, device",
            _SPECULATOR + "DraftModelSpeculator.load_model": "self, target_model",
            _SPECULATOR + "DraftModelSpeculator.load_draft_model": (
                "self, target_model, target_attn_layer_names"
            ),
            _SPECULATOR + "BaseSpeculator.init_cudagraph_manager": "self, cudagraph_mode",
            _SPECULATOR + "BaseSpeculator.capture": "self",
            _SPECULATOR + "BaseSpeculator.propose": (
                "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, "
                "aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, "
                "temperature, seeds, dp_sync_state=, dummy_run=, skip_attn_for_dummy_run=, "
                "mm_inputs=, is_profile=, num_speculative_tokens="
            ),
        },
        "Drafts all K tokens of P-EAGLE in one pass.",
        PUBLIC,
    ),
    Hook(
        "scheduling.scheduler:DraftingScheduler",
        {_SCHEDULER + "_update_after_schedule": "self, scheduler_output"},
        "Chooses K at the end of scheduling, where asynchronous scheduling reads it.",
        "`Scheduler.schedule` asks a method for the step's number of draft tokens.",
    ),
    Hook(
        "scheduling.scheduler:DraftingScheduler",
        {
            _SCHEDULER + "__init__": (
                "self, vllm_config, kv_cache_config, structured_output_manager, block_size, "
                "hash_block_size=, mm_registry=, include_finished_set=, log_stats="
            ),
            _SCHEDULER + "add_request": "self, request",
            _SCHEDULER + "schedule": "self, throttle_prefills=",
            _SCHEDULER + "update_draft_token_ids": "self, draft_token_ids",
            _SCHEDULER + "update_draft_token_ids_in_output": (
                "self, draft_token_ids, scheduler_output"
            ),
            _SCHEDULER + "make_spec_decoding_stats": (
                "self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, "
                "num_invalid_spec_tokens, request_id"
            ),
            _SCHEDULER + "update_from_output": "self, scheduler_output, model_runner_output",
            _SCHEDULER + "get_grammar_bitmask": "self, scheduler_output",
        },
        "Tells the policy of each step, and limits the drafts of single requests.",
        PUBLIC,
    ),
)


def parameters(function: Any) -> str:
    """A function's parameters, without types: names, "=" behind those with a default, stars."""
    written, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        keyword_only |= parameter.kind == parameter.VAR_POSITIONAL
        if parameter.kind == parameter.KEYWORD_ONLY and not keyword_only:
            written.append("*")
            keyword_only = True
        default = "" if parameter.default is parameter.empty else "="
        written.append(stars.get(parameter.kind, "") + parameter.name + default)
    return ", ".join(written)


def broken(hooks: Iterable[Hook] = HOOKS, *, loaded_only: bool = False) -> Iterator[str]:
    """What in the installed vLLM is not as the hooks expect, a sentence each. To be asked before
    anything is patched. `loaded_only` leaves out modules that this process has not imported, as
    importing all of them takes seconds."""
    for hook in hooks:
        for target, expected in hook.targets.items():
            if loaded_only and target.partition(":")[0] not in sys.modules:
                continue
            if (fault := _fault(target, expected)) is not None:
                yield f"hook {hook.ours}: vLLM's {target} {fault}"


def _fault(target: str, expected: str | None) -> str | None:
    module, _, name = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split(".")[: -1 if expected is None else None]:
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"is not there ({error})"
    given = None if expected is None else parameters(found)
    return None if given == expected else f"takes ({given}), not ({expected})"


def main() -> None:
    """Check all hooks against the installed vLLM. Exits with 1, and prints what does not fit, if it
    breaks one."""
    if faults := list(broken()):
        sys.exit("\n".join(faults))
    print(f"{sum(len(hook.targets) for hook in HOOKS)} places of vLLM are as expected")


if __name__ == "__main__":
    main()
