"""P-EAGLE in vLLM's V2 model runner: a pass is laid out on the device and runs as a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
from vllm.v1.worker.gpu.states import RequestState

from drafters.model.selector import top_candidates
from drafters.ops import selector_triton
from drafters.vllm.own_drafter import head_backend
from drafters.vllm.path_selector import ServedSelector, load_served_selector
from drafters.vllm.v2.deferring import DeferringSpeculator
from drafters.vllm.v2.graphs import Graphs
from drafters.vllm.verification.greedy import target_ids


class ParallelSpeculator(DeferringSpeculator):
    """The counterpart of `drafters.vllm.v1.parallel.ParallelDrafter`; the most similar one in vLLM
    is DFlash's (v1/worker/gpu/spec_decode/dflash/speculator.py).

    A pass that drafts K has K - 1 masked positions of each request, and drafts from them and from
    the last place before them. A path selector, if the head has one, chooses the drafts behind the
    first one after another, in the same graph.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, requests: RequestState
    ) -> None:
        super().__init__(vllm_config, device, requests)
        if (backend := head_backend(vllm_config)) is not None:
            self.speculative_config.attention_backend = backend
        self.mask_token = get_parallel_drafting_token_id(self.draft_model_config.hf_config)
        # vLLM's dummy runs leave room for so many tokens (GPUModelRunner._dummy_run).
        self.num_query_per_req, self.num_extra_query_per_req = self.k_max, self.k_max - 1
        self.hidden_states = torch.zeros(
            self.max_num_tokens, self.hidden_size, dtype=self.dtype, device=device
        )

    @property
    def most_entered(self) -> int:
        """The most tokens of a pass, which enters those of the step too."""
        return self.max_num_tokens

    # Loading

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head. It takes no images: they reach it in the target's hidden states."""
        super().load_model(target_model)
        self.supports_mm_inputs = False

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the head as vLLM does for EAGLE-3, the hidden state of masked slots and the path
        selector."""
        model = super().load_draft_model(target_model, target_attn_layer_names)
        self.selector = load_served_selector(self.vllm_config, target_model, model, self.device)
        self._fill_mask_state(model)
        # The name is that of V1 proposers, which report.py reads.
        self.parallel_drafting_hidden_state_tensor = self._mask_state
        return model

    def _fill_mask_state(self, head: Any) -> None:
        self._mask_state.copy_(head.combine_hidden_states(head.mask_hidden.view(1, -1)).view(-1))

    def head_changed(self) -> None:
        """Make anew what is made of the head's weights, where graphs read it."""
        super().head_changed()
        self._fill_mask_state(self.model)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make the managers of graphs, anew after vLLM's memory profile; none if the attention's
        backend supports no graphs of full decode steps, or of steps as long as a pass."""
        supported = self.attn_cg_support.min_cg_support.value
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        full = full and supported >= AttentionCGSupport.UNIFORM_BATCH.value
        for group in self.attn_groups[self.group]:
            threshold = group.get_metadata_builder().reorder_batch_threshold
            full = full and (threshold is None or threshold >= 2 * self.k_max)
        self._graphs = None
        if full:
            self._graphs = Graphs(self.vllm_config, self.device, self.k_max, owner=self)

    def capture(self) -> None:
        """Capture the graphs of the pass for each K."""
        if self._graphs is None:
            return
        self._rows.zero_()
        self._drafts.zero_()
        self._graphs.capture(
            self._generate,
            self.input_buffers,
            self.block_tables,
            self.attn_groups,
            self.kv_cache_config,
            self.max_model_len,
            causal=True,
            prepare_forward=self._refresh,
        )

    def _refresh(self, count: int, metadata: dict[str, Any] | None) -> None:
        """Update the attention's metadata in the graph, before the pass, if its backend can."""
        if metadata is not None and self.supports_decode_metadata_update:
            self._update_draft_decode_metadata(metadata, count)

    # Serving

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,  # [tokens, hidden]
        aux_hidden_states: list[torch.Tensor] | None,  # taps of [tokens, hidden]
        num_sampled: torch.Tensor,  # [requests]
        num_rejected: torch.Tensor,  # int32 [requests]: drafts that this step rejected
        last_sampled: torch.Tensor,  # by slot of RequestState, like the next ones: [slots]
        next_prefill_tokens: torch.Tensor,  # [tokens that vLLM's drafters look ahead, slots]
        temperature: torch.Tensor,  # [slots]
        seeds: torch.Tensor,  # [slots]
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft after a step: int64 `[requests, k_max]`, on the device, of which the first
        `num_speculative_tokens` columns (by default all) are drafts. The row of a request in
        prefill means nothing. Without taps the head reads `last_hidden_states`.

        How many of a request's drafts were accepted is told by `num_rejected`. The tokens
        themselves are read from the runner's RequestState, which has those sampled in this step:
        `last_sampled` and `next_prefill_tokens` are not needed. Nor are `temperature` and `seeds`:
        `sampling` has them, where drafts are drawn."""
        k = self.k_max if num_speculative_tokens is None else num_speculative_tokens
        count, states = input_batch.num_reqs, aux_hidden_states or [last_hidden_states]
        drafts = self.draft_tokens[:count]
        if skip_attn_for_dummy_run:  # the memory profile, before there is a KV cache
            tokens = input_batch.num_tokens + count * max(0, k - 1)
            self._generate(k, count, min(tokens, self.max_num_tokens), None, None, None)
            return drafts
        self._warm_up(states)
        if dummy_run:
            self._pass(input_batch, states, num_rejected, k, dummy_held=0)
            return drafts
        if k == 0 and self._defer(input_batch, states):
            return drafts
        if self._tokens(input_batch, k) > self.max_num_tokens:
            self._catch_up(input_batch, states)
        if self._tokens(input_batch, k) > self.max_num_tokens:
            k = 0  # the scheduler leaves room for masked positions, vLLM's warm-up does not
        self._refresh_sampling(input_batch)
        self._pass(input_batch, states, num_rejected, k)
        self._held[input_batch.idx_mapping_np] = 0
        return drafts

    def _tokens(self, batch: InputBatch, k: int) -> int:
        """Number of tokens in a pass that drafts `k`."""
        held, lengths = self._held[batch.idx_mapping_np], batch.num_scheduled_tokens
        return int(held.sum() + lengths.sum()) + batch.num_reqs * max(0, k - 1)

    def _forward(
        self,
        tokens: int,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        across: torch.Tensor | None,
        mode: CUDAGraphMode,
    ) -> torch.Tensor:
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=tokens,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=tokens),
        ):
            last: torch.Tensor = self.model(
                input_ids=self.input_buffers.input_ids[:tokens],
                positions=self.input_buffers.positions[:tokens],
                hidden_states=self.hidden_states[:tokens],
                inputs_embeds=None,
            )[0]
        return last

    def _choose(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The tokens of `DeferringSpeculator._choose`, along the path that a selector chooses."""
        count = len(slots)
        if self.selector is None or len(hidden) < 2 * count:
            return super()._choose(hidden, slots, positions)
        logits = self.model.logits_processor(self.model.lm_head, hidden)
        states, logits = (x.view(count, len(hidden) // count, -1) for x in (hidden, logits))
        return self._walk(self.selector, states, logits, slots, positions)

    def _walk(
        self,
        selector: ServedSelector,
        states: torch.Tensor,  # [requests, k, hidden]
        logits: torch.Tensor,  # [requests, k, draft vocabulary]
        slots: torch.Tensor,  # [requests]
        positions: torch.Tensor,  # [requests]
    ) -> torch.Tensor:
        top, candidates = top_candidates(logits[:, 1:], selector.module.config.candidates)
        scores = torch.empty_like(top, dtype=torch.float32)
        path = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
        path[:, 0] = logits[:, 0].argmax(-1)
        tables = selector.tables
        walked = (
            top, candidates, selector.module.project(states[:, 1:]).contiguous(),
            tables.before, tables.candidate, path, scores,
        )  # fmt: skip
        if self.sampling is None:
            selector_triton.walk(*walked)
            return target_ids(self.model, path).flatten()
        for draft in range(path.shape[1]):
            if draft:
                selector_triton.walk(*walked, begin=draft - 1, end=draft)
            tokens = target_ids(self.model, path[:, draft].contiguous())
            if draft:
                law = scores[:, draft - 1]
                ids = target_ids(self.model, candidates[:, draft - 1]).contiguous()
            else:
                law = logits[:, 0]
                ids = self._target_ids
            self.sampling.draw(tokens, law, ids, slots, positions + draft)
            path[:, draft] = selector.to_draft(tokens)
        return target_ids(self.model, path).flatten()
