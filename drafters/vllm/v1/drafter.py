"""Draft heads in vLLM's V1 model runner: any K at each step, and no pass of the head at K = 0.

This is what the drafters for P-EAGLE (parallel.py) and EAGLE-3 (sequential.py) share.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from drafters.config import MAX_DEFERRED_STEPS, DrafterConfig
from drafters.ops.gather import gather
from drafters.vllm.own_drafter import longest_text, refuse
from drafters.vllm.path_selector import ServedSelector, load_served_selector
from drafters.vllm.scheduling.limits import draft_limit
from drafters.vllm.v1 import bf16_head
from drafters.vllm.v1.kv_state import DrafterKVState
from drafters.vllm.v1.layout import Layout, Rows, lay_out, stored
from drafters.vllm.verification.greedy import (
    draft_vocabulary,
    greedy_draft_tokens,
    most_probable,
)
from drafters.vllm.verification.sampled_drafts import DraftSampling

Ints = npt.NDArray[np.int64]


class Drafter(EagleProposer, ABC):
    """Replaces vLLM's proposer (vllm/v1/spec_decode/llm_base_proposer.py), with its weights,
    buffers and attention groups.

    vLLM's lays out every pass for the largest K, and for rejected tokens too. This one enters
    accepted tokens into the head's KV cache (kv_state.py) and drafts as many as each request may
    have. It can skip steps: the target's hidden states are stored, and entered by the next pass. A
    subclass says how drafts are made, in the same pass or one by one.
    """

    masked_per_token: int  # masked positions in a pass for each draft token after the first
    carries: bool  # whether a pass continues from the hidden states of the one before
    selector: ServedSelector | None = None  # of a P-EAGLE head that has one
    selector_in_graphs = False  # drafts are chosen outside of graphs

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: Any, config: DrafterConfig
    ) -> None:
        refuse(vllm_config)
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.k_max: int = config.head_k(self.num_speculative_tokens)
        self.window = config.window(self.max_num_tokens)
        self.context_tokens = config.context_tokens
        self._half_rows = bf16_head.pays_up_to() if config.bfloat16_on_cpu else 0
        self.half = self._half_rows == bf16_head.MANY  # inside the compiled model, for any rows
        # vLLM finds a saved compiled model by its configuration, which must say what was measured.
        settled = replace(config, bfloat16_on_cpu=self.half)
        vllm_config.additional_config = {**vllm_config.additional_config, **settled.entry()}
        self.passes = 0
        self.missed_tokens_read = 0  # of earlier steps, by the pass of the latest step
        self.synchronized = 0.0  # `perf_counter` when the device had last finished all its work
        self._target_vocabulary = vllm_config.model_config.get_vocab_size()
        self._target_ids: torch.Tensor | None = None  # [draft vocabulary], where ids differ
        self._sampling: DraftSampling | None = None  # of this step, where not all are greedy
        self._contexts: DrafterKVState | None = None
        self._store: torch.Tensor | None = None  # [max_num_seqs * window, taps * hidden]
        self._gathered: torch.Tensor | None = None  # [max_num_tokens, taps * hidden]
        # Steps at K = 0, of one token a request, whose hidden states are not in the store yet:
        # slots, positions and states of each. One step on CUDA, whose graphs overwrite the states.
        self._deferred: list[tuple[Ints, Ints, Sequence[torch.Tensor]]] = []
        self._defers = min(MAX_DEFERRED_STEPS, self.window) if device.type == "cpu" else 1

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head and its path selector, and allocate the store of hidden states: vLLM counts
        what exists by now before it sizes the KV cache."""
        with bf16_head.half_precision() if self.half else nullcontext():
            super().load_model(target_model)
        self._longest_text = longest_text(self.model)
        head = self.model.lm_head
        self.lm_head = bf16_head.twin(head) if self._half_rows and bf16_head.is_wide(head) else head
        self._target_ids = draft_vocabulary(self.model)
        self.selector = load_served_selector(
            self.vllm_config, target_model, self.model, self.device
        )
        # Garbage of loading frees oneDNN handles, which fails while the model is traced
        # (vllm/_custom_ops.py, CPUDNNLGEMMHandler).
        gc.collect()
        self._store = torch.empty(
            (self.max_batch_size * self.window, self.model.model.fc_input_size),
            dtype=self.dtype,
            device=self.device,
        )
        self._gathered = self._store.new_empty((self.max_num_tokens, self._store.shape[1]))

    def head_changed(self) -> None:
        """Make anew what vLLM and `load_model` make of the head's weights: its weights are others
        (drafters/vllm/head_swap.py). What the head before has entered stays in its KV cache."""
        if self.parallel_drafting_hidden_state_tensor is not None:
            shared = self.model.combine_hidden_states(self.model.mask_hidden.view(1, -1))
            self.parallel_drafting_hidden_state_tensor.copy_(shared.view(-1))
        self._target_ids = draft_vocabulary(self.model)

    @property
    def longest(self) -> int:
        """The most tokens of a request that is drafted for. vLLM may lower the target's when it
        sizes the KV cache, on the runner alone (vllm/v1/engine/core.py, _initialize_kv_caches)."""
        return min(int(self.runner.max_model_len), self._longest_text)

    @property
    def contexts(self) -> DrafterKVState:
        """The state of the head's KV cache by request. Made in the first step, when the KV cache
        has its size. Raises NotImplementedError then, if the attention kernel splits its blocks."""
        if self._contexts is None:
            table = self.runner.input_batch.block_table[self.kv_cache_gid]
            if table.block_size != self.block_size:
                raise NotImplementedError(
                    f"KV cache blocks of {self.block_size} tokens, which the attention kernel "
                    f"splits into {table.block_size}, are not supported"
                )
            self._contexts = DrafterKVState(
                self.max_batch_size,
                self.runner.kv_cache_config.num_blocks,
                self.block_size,
                self.window,
                self.context_tokens,
            )
        return self._contexts

    def sync_requests(self, scheduled: Any) -> None:
        """Update `contexts` by a SchedulerOutput's new, finished, preempted and growing requests,
        before the runner updates its own."""
        contexts, group = self.contexts, self.kv_cache_gid
        left = (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ()))
        if left:  # deferred states belong to slots, which other requests may get
            self._store_deferred()
        for request in left:
            contexts.remove(request)
        for new in scheduled.scheduled_new_reqs:
            limit = draft_limit(new.sampling_params, self.k_max)
            contexts.add(new.req_id, new.num_computed_tokens, new.block_ids[group], limit)
        cached = scheduled.scheduled_cached_reqs
        for row, blocks in enumerate(cached.new_block_ids):
            if blocks is None:
                continue
            request = cached.req_ids[row]
            if request in cached.resumed_req_ids:
                limit = draft_limit(self.runner.requests[request].sampling_params, self.k_max)
                contexts.add(request, cached.num_computed_tokens[row], blocks[group], limit)
            else:
                contexts.own(blocks[group])

    def draft(
        self,
        k: int,
        drafted: dict[str, list[int]],  # request -> draft tokens that this step verified
        sampled: torch.Tensor,  # [requests, longest], -1 behind a request's last token
        states: Sequence[torch.Tensor],  # the step's hidden states at each tap: [tokens, hidden]
        common: CommonAttentionMetadata,
        sampling: Any,  # the step's SamplingMetadata
        *,
        wanting: npt.NDArray[np.bool_] | None = None,  # [requests], those to draft for
        reading: npt.NDArray[np.bool_] | None = None,  # [requests], those to enter in any case
    ) -> list[list[int]] | None:
        """Up to `k` draft tokens for each request of the batch, in its order: the most probable
        ones, or drawn as the request's tokens are (sampled_drafts.py). A request has an empty list
        while its prompt is read, where its limit is 0, at the largest length, and where the pass
        has no room for it. At `k` = 0 the answer is None: nothing is drafted, and the hidden states
        are stored. In steps of one token a request they are only kept on a CPU, for up
        to MAX_DEFERRED_STEPS steps, and then stored together.

        Where `wanting` is given, only these requests are drafted for. Of the others the pass enters
        those in `reading`; the hidden states of the rest are stored."""
        batch = self.runner.input_batch
        count: int = batch.num_reqs
        self.missed_tokens_read = 0
        contexts, slots = self.contexts, self.contexts.slots(batch.req_ids)
        num_computed_tokens = batch.num_computed_tokens_cpu[:count].astype(np.int64)
        if k == 0 and common.max_query_len == 1:  # the usual step of a busy engine
            self._deferred.append((slots, num_computed_tokens, states))
            if len(self._deferred) >= self._defers:
                self._store_deferred()
            return None
        self._store_deferred()
        query_start_loc = common.query_start_loc_cpu.numpy()
        ends = num_computed_tokens + np.diff(query_start_loc[: count + 1])
        tokens_made = sampled.cpu().numpy()
        self.synchronized = perf_counter()
        counts = (tokens_made >= 0).sum(1)
        verified = self._verified(drafted)
        ends -= np.where(verified > 0, verified + 1 - counts, 0)  # rejected
        limits = contexts.limit[slots]
        followed = limits > 0
        if k == 0:
            self._keep(
                np.flatnonzero(followed), slots, num_computed_tokens, ends, query_start_loc, states
            )
            return None

        unread = self.runner.discard_request_mask.np[:count]
        wanted = np.where(unread, 0, np.minimum(limits, k))
        if wanting is not None:
            wanted = np.where(wanting, wanted, 0)
        wanted = np.clip(self.longest - 1 - ends, 0, wanted)
        start = contexts.start(slots, ends)
        taken = followed & (start < ends)
        if wanting is not None and reading is not None:
            taken &= wanting | reading
        masked = self.masked_per_token * np.maximum(wanted - 1, 0)
        lengths = np.where(taken, ends - start + masked, 0)
        taken &= np.cumsum(lengths) <= self.max_num_tokens
        late = np.flatnonzero(followed & ~taken)
        if late.size:
            self._keep(late, slots, num_computed_tokens, ends, query_start_loc, states)
        index = np.flatnonzero(taken)
        drafts: list[list[int]] = [[] for _ in range(count)]
        if not index.size:
            return drafts
        chosen = slots[index]
        rows = Rows(
            index=index,
            slot=chosen,
            context_start=contexts.context_start[chosen],
            start=start[index],
            num_computed_tokens=num_computed_tokens[index],
            end=ends[index],
            k=wanted[index],
            # The token behind the last entered one: from the prompt, or sampled.
            newest=np.where(
                unread[index],
                batch.token_ids_cpu[index, ends[index]],
                tokens_made[index, counts[index] - 1],
            ),
        )
        self.missed_tokens_read = int(np.maximum(rows.num_computed_tokens - rows.start, 0).sum())
        self._sampling = None
        if not sampling.all_greedy:
            self._sampling = DraftSampling(
                sampling.seeded_requests, sampling, counts, self._target_vocabulary
            )
        tables = batch.block_table[self.kv_cache_gid].get_numpy_array()
        proposed = self._propose(rows, tables, query_start_loc, states, common)
        contexts.enter(chosen, rows.end, tables[index])
        for row, tokens in zip(index.tolist(), proposed, strict=True):
            drafts[row] = tokens
        return drafts

    def unread(self, slots: Ints) -> Ints:
        """How many tokens of each request the head has missed and can still read, `[requests]`,
        before the step whose tokens `draft` gets next."""
        missed = self.contexts.unread(slots) + len(self._deferred)
        return np.minimum(missed, self.window)

    @abstractmethod
    def _propose(
        self,
        rows: Rows,
        tables: npt.NDArray[np.int32],  # [batch, blocks]
        query_start_loc: npt.NDArray[np.int32],  # [batch + 1], of the step
        states: Sequence[torch.Tensor],
        common: CommonAttentionMetadata,
    ) -> list[list[int]]:
        """Enter positions `start` to `end` - 1 of each of `rows`, and draft its `k` tokens: a list
        for each of `rows`, in their order. `states` are those of `draft`: the step's hidden states
        at each tap, `[tokens of the step, hidden]`; `query_start_loc` says whose they are."""

    def _verified(self, drafted: dict[str, list[int]]) -> Ints:
        """How many draft tokens of each request the step verified: `[requests]`."""
        requests = self.runner.input_batch.req_ids
        return np.fromiter((len(drafted.get(name, ())) for name in requests), np.int64)

    def _keep(
        self,
        index: Ints,  # rows of the batch
        slots: Ints,  # [requests], like the next two
        num_computed_tokens: Ints,
        ends: Ints,
        query_start_loc: npt.NDArray[np.int32],
        states: Sequence[torch.Tensor],
    ) -> None:
        """Store the newest hidden states of requests that this step's pass does not enter."""
        if not index.size:
            return
        computed, end, slot = num_computed_tokens[index], ends[index], slots[index]
        since = np.maximum(computed, end - self.window)
        lengths = end - since
        owner = np.repeat(np.arange(len(index)), lengths)
        offsets = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = since[owner] + offsets
        source = self._device(query_start_loc[index[owner]] + positions - computed[owner])
        self._store_at(slot[owner], positions, [state[source] for state in states])
        self.contexts.skip(slot, end)

    def _store_deferred(self) -> None:
        if not self._deferred:
            return
        slots = np.concatenate([step[0] for step in self._deferred])
        positions = np.concatenate([step[1] for step in self._deferred])
        taps = [[tap[: len(at)] for tap in states] for at, _, states in self._deferred]
        self._store_at(slots, positions, [torch.cat(tap) for tap in zip(*taps, strict=True)])
        self.contexts.skip(slots, positions + 1)  # of several entries for a slot the last counts
        self._deferred.clear()

    def _store_at(self, slots: Ints, positions: Ints, states: Sequence[torch.Tensor]) -> None:
        assert self._store is not None
        rows = self._device(stored(slots, positions, self.window))
        self._store.index_copy_(0, rows, torch.cat(list(states), dim=-1))

    def _lay_out(
        self, rows: Rows, tables: npt.NDArray[np.int32], query_start_loc: npt.NDArray[np.int32]
    ) -> Layout:
        """The tokens of a pass over `rows`; the arguments are those of `_propose`."""
        return lay_out(
            rows,
            tokens=self.runner.input_batch.token_ids_cpu,
            tables=tables,
            query_start_loc=query_start_loc,
            block_size=self.block_size,
            window=self.window,
            mask_token=self.parallel_drafting_token_id,
        )

    def _enter(self, layout: Layout, states: Sequence[torch.Tensor]) -> None:
        """Fill the pass's input buffers: tokens and positions, and the target's hidden states at
        entered positions."""
        count = len(layout.ids)
        self.input_ids[:count] = self._device(layout.ids)
        self.positions[:count] = self._device(layout.positions)
        assert self._store is not None and self._gathered is not None
        hidden = gather(
            states,
            self._device(layout.fresh_from),
            self._store,
            self._device(layout.held_from),
            self._gathered,
        )
        where = self._device(np.concatenate([layout.fresh, layout.held]))
        self.hidden_states.index_copy_(0, where, self.model.combine_hidden_states(hidden))

    def _pass(
        self, layout: Layout, rows: Rows, common: CommonAttentionMetadata, depth: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head once over the buffers; `depth` counts the passes of a step. Returns hidden
        states to draft from and to continue with, `[sum of k, hidden]` each."""
        self.passes += 1
        count = len(layout.ids)
        metadata = self._metadata(layout, rows, common)
        _, per_layer = self.build_per_group_and_layer_attn_metadata(metadata, draft_index=depth)
        mode, padded, across = self._determine_batch_execution_and_padding(count)
        arguments, size = self.build_model_inputs_first_pass(count, padded, None)
        with set_forward_context(
            per_layer,
            self.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(size, metadata.slot_mapping),
        ):
            last, carried = self.model(**arguments)
        drafts = self._device(layout.drafts)
        return last[drafts], carried[drafts] if self.carries else last

    def _metadata(self, layout: Layout, rows: Rows, common: Any) -> CommonAttentionMetadata:
        table = common.block_table_tensor[self._device(rows.index)]
        skipped = rows.context_start // self.block_size
        if skipped.any():
            columns = np.arange(table.shape[1])[None, :] + skipped[:, None]
            table = table.gather(1, self._device(np.minimum(columns, table.shape[1] - 1)))
        queries = torch.from_numpy(layout.queries)
        return CommonAttentionMetadata(
            query_start_loc=queries.to(self.device, non_blocking=True),
            query_start_loc_cpu=queries,
            seq_lens=self._device(layout.context),
            seq_lens_cpu_upper_bound=torch.from_numpy(layout.context),
            num_reqs=len(rows.index),
            num_actual_tokens=len(layout.ids),
            max_query_len=int(np.diff(layout.queries).max()),
            max_seq_len=int(layout.context.max()),
            block_table_tensor=table,
            slot_mapping=self._device(layout.slots),
        )

    def _tokens(self, hidden: torch.Tensor, rows: Ints, offsets: Ints) -> torch.Tensor:
        """Draft tokens `[drafts]` from hidden states `[drafts, hidden]`; `rows` are those of their
        requests in the batch, `offsets` how many drafts of the request come before."""
        if self._sampling is None:
            return greedy_draft_tokens(self.model, self._output_matrix(len(hidden)), hidden)
        return self._drawn(self._logits(hidden), rows, offsets)

    def _output_matrix(self, count: int) -> Any:
        """The module that makes logits of `count` hidden states."""
        return self.lm_head if self.half or count <= self._half_rows else self.model.lm_head

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's logits `[drafts, draft vocabulary]` of hidden states `[drafts, hidden]`."""
        logits: torch.Tensor = self.model.logits_processor(self._output_matrix(len(hidden)), hidden)
        return logits

    def _drawn(self, logits: torch.Tensor, rows: Ints, offsets: Ints) -> torch.Tensor:
        """The tokens of `_tokens` from the head's logits `[drafts, draft vocabulary]`."""
        tokens = most_probable(self.model, logits)
        if self._sampling is None:
            return tokens
        return self._sampling.draw(tokens, logits, self._target_ids, rows, offsets)

    def _device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)
