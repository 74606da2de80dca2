"""P-EAGLE in vLLM's V2 model runner: a pass is laid out on the device and runs as a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
from vllm.v1.worker.gpu.states import RequestState

from drafters.config import DEFERRED
from drafters.ops import inputs_triton
from drafters.ops.inputs_triton import FIELDS
from drafters.vllm.own_drafter import refuse
from drafters.vllm.v2.graphs import Graphs, Ints, drafted
from drafters.vllm.verification.greedy import greedy_draft_tokens


class ParallelSpeculator(DraftModelSpeculator):
    """The counterpart of `drafters.vllm.v1.parallel.ParallelDrafter`; the most similar one in vLLM
    is DFlash's (v1/worker/gpu/spec_decode/dflash/speculator.py).

    No step waits for the device, and only the device knows how many drafts were accepted. So a
    request's part of a pass has a place for each of its tokens that the target read, and for K - 1
    masked slots:

        positions   start .. end-1   end .. end+K-2   the places that rejected drafts leave
        token       the next one     the mask token   the mask token
        draft from  the last one     all

    Places that rejected drafts leave come last, so that no draft attends to them. All positions lie
    within the blocks that the scheduler reserved for the step, except the padding of a graph
    (graphs.py), whose keys and values are not stored.

    At K = 0 hidden states are kept for DEFERRED steps, and entered together.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, requests: RequestState
    ) -> None:
        refuse(vllm_config)
        super().__init__(vllm_config, device)
        self.requests = requests
        self.k_max: int = self.num_speculative_steps
        self.mask_token = get_parallel_drafting_token_id(self.draft_model_config.hf_config)
        # vLLM's dummy runs leave room for so many tokens (GPUModelRunner._dummy_run).
        self.num_query_per_req, self.num_extra_query_per_req = self.k_max, self.k_max - 1
        # A full batch's deferred tokens fit in a pass by themselves.
        self.window = max(1, min(DEFERRED, self.max_num_tokens // self.max_num_reqs))
        self._held: Ints = np.zeros(self.max_num_reqs, np.int64)  # hidden states kept, by slot
        self.hidden_states = torch.zeros(
            self.max_num_tokens, self.hidden_size, dtype=self.dtype, device=device
        )
        self._rows = torch.zeros(len(FIELDS) * self.max_num_reqs, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(self.max_num_reqs * self.k_max, dtype=torch.int64, device=device)
        self._graphs = Graphs(vllm_config, device, 0, owner=self)

    # Loading

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head. It takes no images: they reach it in the target's hidden states."""
        super().load_model(target_model)
        self.supports_mm_inputs = False

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the head as vLLM does for EAGLE-3, and allocate the inputs of a pass before vLLM
        sizes the KV cache."""
        model = load_eagle_model(target_model, self.vllm_config)
        # The name is that of V1 proposers, which report.py reads.
        self.parallel_drafting_hidden_state_tensor = (
            model.combine_hidden_states(model.mask_hidden.view(1, -1)).view(-1).to(self.dtype)
        )
        width = model.model.fc_input_size
        self._store = torch.zeros(
            (self.max_num_reqs * self.window, width), dtype=self.dtype, device=self.device
        )
        self._gathered = self._store.new_zeros((self.max_num_tokens, width))
        return model

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Find the KV cache group of the head's layers; patches.head_in_one_group makes it one.
        Take over the largest length of a request, too: vLLM may have lowered it since, on the
        runner alone (v1/engine/core.py, _initialize_kv_caches)."""
        super().set_attn(*args, **kwargs)
        self.max_model_len = self.requests.max_model_len
        (self.group,) = (index for index, groups in enumerate(self.attn_groups) if groups)
        for group in self.attn_groups[self.group]:
            threshold = group.get_metadata_builder().reorder_batch_threshold
            if threshold is not None and threshold < 2 * self.k_max:
                raise NotImplementedError(
                    f"{group.backend.get_name()} decodes at most {threshold} tokens of a request "
                    f"at once, P-EAGLE needs {2 * self.k_max}: set attention_backend"
                )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make the managers of graphs, anew after vLLM's memory profile; none if the attention
        backend supports no graphs of full decode steps."""
        supported = self.attn_cg_support.min_cg_support.value
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        full = full and supported >= AttentionCGSupport.UNIFORM_BATCH.value
        k_max = self.k_max if full else 0
        self._graphs = Graphs(self.vllm_config, self.device, k_max, owner=self)

    def capture(self) -> None:
        """Capture the graphs of the pass for each K."""
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

    def begin(self, slot: int) -> None:
        """Forget what is kept for a slot of the runner's RequestState: it has a new request."""
        self._held[slot] = 0

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
        `last_sampled` and `next_prefill_tokens` are not needed. Drafts are greedy."""
        k = self.k_max if num_speculative_tokens is None else num_speculative_tokens
        count, states = input_batch.num_reqs, aux_hidden_states or [last_hidden_states]
        drafts = self.draft_tokens[:count]
        if skip_attn_for_dummy_run:  # the memory profile, before there is a KV cache
            tokens = input_batch.num_tokens + count * max(0, k - 1)
            self._generate(k, count, min(tokens, self.max_num_tokens), None, None, None)
            return drafts
        if dummy_run:
            self._pass(input_batch, states, num_rejected, k, dummy=True)
            return drafts
        slots = input_batch.idx_mapping_np
        lengths = input_batch.num_scheduled_tokens
        held = int(self._held[slots].max())
        if k == 0 and held + 1 < self.window and lengths.max() == 1:
            self._keep(input_batch, states)
            return drafts
        if held and self._tokens(input_batch, k) > self.max_num_tokens:
            self._pass(input_batch, states, None, 0)
            self._held[slots] = 0
        if self._tokens(input_batch, k) > self.max_num_tokens:
            k = 0  # the scheduler leaves room for masked slots, vLLM's warm-up does not
        self._pass(input_batch, states, num_rejected, k)
        self._held[slots] = 0
        return drafts

    def _tokens(self, batch: InputBatch, k: int) -> int:
        """Number of tokens in a pass that drafts `k`."""
        held, lengths = self._held[batch.idx_mapping_np], batch.num_scheduled_tokens
        return int(held.sum() + lengths.sum()) + batch.num_reqs * max(0, k - 1)

    def _keep(self, batch: InputBatch, states: Sequence[torch.Tensor]) -> None:
        """Store the hidden states of a step without drafts, one token a request. The host knows its
        positions, as no draft can be rejected."""
        count = batch.num_reqs
        rows = batch.idx_mapping[:count] * self.window + batch.positions[:count] % self.window
        self._store.index_copy_(0, rows, torch.cat([s[:count] for s in states], dim=-1))
        self._held[batch.idx_mapping_np] += 1

    def _pass(
        self,
        batch: InputBatch,
        states: Sequence[torch.Tensor],
        rejected: torch.Tensor | None,
        k: int,
        *,
        dummy: bool = False,
    ) -> None:
        """Enter the kept hidden states, and this step's unless `rejected` is None; draft `k`."""
        count, most = batch.num_reqs, self.max_model_len
        held = np.zeros(count, np.int64) if dummy else self._held[batch.idx_mapping_np]
        read = 0 if rejected is None else batch.num_scheduled_tokens
        entered = held + read  # at most, of each request
        needed = entered + max(0, k - 1)
        upper = batch.seq_lens_cpu_upper_bound
        longest = int(upper[:count].max())
        graph = self._graphs.find(k, entered, most - longest)
        if graph is not None:
            k, widths = drafted(graph), np.full(count, graph.uniform_token_count, np.int64)
        else:
            widths = needed
        total = int(widths.sum())
        assert total <= self.max_num_tokens  # else slices of the buffers would be too short
        shape = graph or BatchExecutionDescriptor(CUDAGraphMode.NONE, total, count)

        queries = np.zeros(count + 1, np.int32)
        np.cumsum(widths, out=queries[1:])
        numbers = self._device(np.stack([queries[:-1], widths, held, needed]))
        padded = shape.num_reqs or count
        self._lay_out(batch, states, rejected, k, numbers, total, padded, dummy)
        behind = int((widths - entered).max())
        self.draft_max_seq_len = min(most, longest + behind)
        metadata = None
        if graph is None or not self.supports_decode_metadata_update:
            metadata = self._build_attn_metadata(
                num_reqs=count,
                batch_desc=shape,
                query_start_loc_np=queries,
                seq_lens_cpu_upper_bound=upper,
                step=behind,
            )
        if graph is not None:
            self._graphs.run(graph)
        else:
            slots = build_slot_mappings_by_layer(
                self.block_tables.slot_mappings[:, :total], self.kv_cache_config
            )
            self._generate(k, count, total, metadata, slots, None)

    def _lay_out(
        self,
        batch: InputBatch,
        states: Sequence[torch.Tensor],
        rejected: torch.Tensor | None,
        k: int,
        # [4, requests]: first token, tokens, hidden states kept, tokens without padding
        numbers: torch.Tensor,
        total: int,
        padded: int,  # requests, with those that pad a graph
        dummy: bool,
    ) -> None:
        """Fill the input buffers of the pass."""
        count, buffers = batch.num_reqs, self.input_buffers
        rows = self._rows[: len(FIELDS) * padded].view(-1, padded)
        starts, tokens = batch.query_start_loc[: count + 1], self.requests.all_token_ids.gpu
        inputs_triton.plan(
            numbers,
            slots=batch.idx_mapping[:count],
            starts=starts,
            positions=batch.positions,
            rejected=rejected,
            tokens=tokens,
            total=total,
            max_model_len=self.max_model_len,
            kept=not dummy,
            rows=rows,
            queries=buffers.query_start_loc[: padded + 1],
            lengths=buffers.seq_lens[:padded],
            drafts=self._drafts[: padded * k].view(padded, k),
        )
        slots = self.block_tables.slot_mappings[self.group]
        inputs_triton.enter(
            rows,
            tokens=tokens,
            tables=self.block_tables.input_block_tables[self.group],
            starts=starts,
            states=states,
            store=self._store,
            block_size=self.block_tables.block_sizes[self.group],
            window=self.window,
            mask_token=self.mask_token,
            ids=buffers.input_ids[:total],
            positions=buffers.positions[:total],
            slots=slots[:total],
            gathered=self._gathered[:total],
        )
        slots[total:] = PAD_SLOT_ID

    def _generate(
        self,
        k: int,
        count: int,
        tokens: int,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        across: torch.Tensor | None,  # ranks, of which there is one
        mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """Run the pass from input buffers to `draft_tokens`: what a graph records."""
        combined = self.model.combine_hidden_states(self._gathered[:tokens])
        rows = self._rows[: len(FIELDS) * count].view(-1, count)
        shared = self.parallel_drafting_hidden_state_tensor
        inputs_triton.spread(rows, combined, shared, self.hidden_states[:tokens])
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=tokens,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=tokens),
        ):
            last, _ = self.model(
                input_ids=self.input_buffers.input_ids[:tokens],
                positions=self.input_buffers.positions[:tokens],
                hidden_states=self.hidden_states[:tokens],
                inputs_embeds=None,
            )
        if k:
            drafting = last[self._drafts[: count * k]]
            chosen = greedy_draft_tokens(self.model, self.model.lm_head, drafting)
            self.draft_tokens[:count, :k] = chosen.view(count, k)

    def _device(self, values: Ints) -> torch.Tensor:
        """Copy to the device without waiting for it, from pinned memory on CUDA."""
        pinned = torch.from_numpy(values)
        if self.device.type == "cuda":
            pinned = pinned.pin_memory()
        return pinned.to(self.device, non_blocking=True)
