"""What this project's speculators on vLLM's V2 runner share: at K = 0 passes of the head are put
off, and what it missed is entered later."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from drafters.config import MAX_DEFERRED_STEPS
from drafters.ops import inputs_triton
from drafters.ops.inputs_triton import FIELDS
from drafters.vllm.own_drafter import refuse
from drafters.vllm.path_selector import ServedSelector
from drafters.vllm.v2.draft_sampling import DeviceDraftSampling
from drafters.vllm.v2.graphs import Graphs, Ints, drafted
from drafters.vllm.verification.greedy import (
    draft_vocabulary,
    greedy_draft_tokens,
    most_probable,
)


class DeferringSpeculator(DraftModelSpeculator):
    """A speculator that keeps the target's hidden states of up to MAX_DEFERRED_STEPS steps at K = 0
    on the device, and enters them into the head's KV cache together.

    No step waits for the device, and only the device knows how many drafts were accepted. So a
    request's part of a pass has a place for each of its tokens that the target read, and for
    `masked` slots:

        positions   start .. end-1   end .. end+masked-1   the places that rejected drafts leave
        token       the next one     the mask token        the mask token

    Places that rejected drafts leave come last, so that no draft attends to them. All positions lie
    within the blocks that the scheduler reserved for the step, except padding: that of a graph
    (graphs.py), and the slot of a request with nothing to enter. Their keys and values are not
    stored.
    """

    hidden_states: torch.Tensor  # [tokens of the largest pass, hidden], which a pass reads
    mask_token = 0  # the token of masked slots
    sampling: DeviceDraftSampling | None = None  # set by the runner where drafts may be drawn
    selector: ServedSelector | None = None  # of a P-EAGLE head that has one
    _graphs: Graphs | None = None  # of a P-EAGLE pass, where the attention's backend has some
    _mask_state: torch.Tensor  # and their hidden state: [hidden]

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, requests: RequestState
    ) -> None:
        refuse(vllm_config)
        super().__init__(vllm_config, device)
        self.requests = requests
        self.k_max: int = self.num_speculative_steps
        # A full batch's deferred tokens fit in a pass by themselves.
        self.window = max(1, min(MAX_DEFERRED_STEPS, self.max_num_tokens // self.max_num_reqs))
        self._warm = False  # whether the kernels of catching up are compiled
        self._held: Ints = np.zeros(self.max_num_reqs, np.int64)  # hidden states kept, by slot
        self._rows = torch.zeros(len(FIELDS) * self.max_num_reqs, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(self.max_num_reqs * self.k_max, dtype=torch.int64, device=device)

    @property
    def most_entered(self) -> int:
        """The most tokens of a pass, all of them kept ones."""
        return self.max_num_reqs * self.window

    # Loading

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the head as vLLM does, and allocate what is kept before vLLM sizes the KV cache."""
        model = load_eagle_model(target_model, self.vllm_config)
        width = model.model.fc_input_size
        self._store = torch.zeros(
            (self.max_num_reqs * self.window, width), dtype=self.dtype, device=self.device
        )
        self._gathered = self._store.new_zeros((self.most_entered, width))
        self._mask_state = self._store.new_zeros(self.hidden_size)
        self._target_ids = draft_vocabulary(model)
        return model

    @property
    def lm_head(self) -> Any:
        """The module that makes the logits of drafts."""
        return self.model.lm_head

    @property
    def selector_in_graphs(self) -> bool:
        """Whether CUDA graphs hold the path selector's tensors."""
        return self._graphs is not None

    def head_changed(self) -> None:
        """Make anew, where graphs read it, what is made of the head's weights: its weights are
        others (drafters/vllm/head_swap.py). What the head before has entered stays in its KV cache.
        """
        if self._target_ids is not None:
            self._target_ids.copy_(draft_vocabulary(self.model))

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Find the KV cache group of the head's layers; patches.head_in_one_group makes it one.
        Take over the largest length of a request, too: vLLM may have lowered it since, on the
        runner alone (v1/engine/core.py, _initialize_kv_caches).

        Raises NotImplementedError if the head's attention would address other blocks than those in
        which the runner views its KV cache: the runner chooses their size for all layers of the
        group, a speculator for those of the head."""
        super().set_attn(*args, **kwargs)
        self.max_model_len = self.requests.max_model_len
        (self.group,) = (index for index, groups in enumerate(self.attn_groups) if groups)
        viewed = _kernel_blocks(self.target_attn_groups[self.group])
        for name, size in _kernel_blocks(self.attn_groups[self.group]).items():
            if viewed[name] != size:
                raise NotImplementedError(
                    f"the draft head's attention reads the KV cache in blocks of {size} tokens, "
                    f"the target's in blocks of {viewed[name]}: set VLLM_USE_V2_MODEL_RUNNER=0"
                )

    # Serving

    def begin(self, slot: int) -> None:
        """Forget what is kept for a slot of the runner's RequestState: it has a new request."""
        self._held[slot] = 0

    def _refresh_sampling(self, batch: InputBatch) -> None:
        """Take over what the batch's requests are sampled with, before they are drafted for."""
        if self.sampling is not None:
            self.sampling.refresh(batch.idx_mapping_np)

    def _defer(self, batch: InputBatch, states: Sequence[torch.Tensor]) -> bool:
        """Keep the hidden states of a step without drafts that has one token of each request, if
        there is room. The host knows its positions, as no draft can be rejected."""
        slots, count = batch.idx_mapping_np, batch.num_reqs
        full = self._held[slots].max() + 1 >= self.window
        if full or batch.num_scheduled_tokens.max() > 1:
            return False
        rows = batch.idx_mapping[:count] * self.window + batch.positions[:count] % self.window
        self._store.index_copy_(0, rows, torch.cat([s[:count] for s in states], dim=-1))
        self._held[slots] += 1
        return True

    def _catch_up(self, batch: InputBatch, states: Sequence[torch.Tensor]) -> None:
        """Enter the kept hidden states of the batch's requests, in a pass without drafts."""
        slots = batch.idx_mapping_np
        if self._held[slots].any():
            self._pass(batch, states, None, 0)
            self._held[slots] = 0

    def _warm_up(self, states: Sequence[torch.Tensor]) -> None:
        """Compile the kernels of catching up, before the first request that needs them would wait
        for it: a pass of one token, which stores nothing."""
        if self._warm:
            return
        self._warm = True
        one = torch.ones(1, dtype=torch.int64, device=self.device)
        batch = SimpleNamespace(
            num_reqs=1,
            idx_mapping=torch.zeros_like(one),
            idx_mapping_np=np.zeros(1, np.int64),
            positions=one,  # its kept token is at 0
            query_start_loc=torch.arange(2, dtype=torch.int32, device=self.device),
            num_scheduled_tokens=np.ones(1, np.int32),
            seq_lens_cpu_upper_bound=torch.full((1,), 2, dtype=torch.int32),
        )
        self._pass(cast("InputBatch", batch), states, None, 0, dummy_held=1)

    def _pass(
        self,
        batch: InputBatch,
        states: Sequence[torch.Tensor],  # taps of [tokens, hidden]
        rejected: torch.Tensor | None,
        k: int,
        *,
        dummy_held: int | None = None,
    ) -> None:
        """Enter the kept hidden states, and this step's unless `rejected` is None; draft `k` in
        parallel. A pass that only warms up stores nothing; it has `dummy_held` kept hidden states
        of each request."""
        count, most = batch.num_reqs, self.max_model_len
        held = self._held[batch.idx_mapping_np]
        if dummy_held is not None:
            held = np.full(count, dummy_held, np.int64)
        read = 0 if rejected is None else batch.num_scheduled_tokens
        entered = held + read  # at most, of each request
        unpadded_lens = entered + max(0, k - 1)
        upper = batch.seq_lens_cpu_upper_bound
        longest = int(upper[:count].max())
        graph = None
        if self._graphs is not None:
            graph = self._graphs.find(k, entered, most - longest)
        if graph is not None:
            k, query_lens = drafted(graph), np.full(count, graph.uniform_token_count, np.int64)
        else:
            # No request is empty: some backends take a pass of no more than one token each for
            # decode steps, one of every request (vllm/v1/attention/backends/utils.py,
            # split_decodes_and_prefills). A slot beyond what is needed is masked.
            query_lens = np.maximum(unpadded_lens, 1)
        total = int(query_lens.sum())
        assert total <= self.most_entered  # else slices of the buffers would be too short
        shape = graph or BatchExecutionDescriptor(CUDAGraphMode.NONE, total, count)

        queries = np.zeros(count + 1, np.int32)
        np.cumsum(query_lens, out=queries[1:])
        host_rows = self._device(np.stack([queries[:-1], query_lens, held, unpadded_lens]))
        padded = shape.num_reqs or count
        self._lay_out(batch, states, rejected, k, host_rows, total, padded, dummy_held is None)
        behind = int((query_lens - entered).max())
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
        if self._graphs is not None and graph is not None:
            if metadata is None:  # building it fills this table too, which the graph reads
                for group in self.attn_groups[self.group]:
                    group.map_to_kernel_block_table(
                        self.block_tables.input_block_tables[self.group]
                    )
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
        host_rows: torch.Tensor,  # [4, requests], as of `reference.plan`
        total: int,
        padded: int,  # requests, with those that pad a graph
        kept: bool,  # whether keys and values are stored
    ) -> None:
        """Fill the input buffers of the pass."""
        count, buffers = batch.num_reqs, self.input_buffers
        rows = self._rows[: len(FIELDS) * padded].view(-1, padded)
        query_start_loc = batch.query_start_loc[: count + 1]
        tokens = self.requests.all_token_ids.gpu
        inputs_triton.plan(
            host_rows,
            slots=batch.idx_mapping[:count],
            query_start_loc=query_start_loc,
            positions=batch.positions,
            rejected=rejected,
            tokens=tokens,
            total=total,
            max_model_len=self.max_model_len,
            kept=kept,
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
            query_start_loc=query_start_loc,
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

    @abstractmethod
    def _forward(
        self,
        tokens: int,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        across: torch.Tensor | None,  # ranks, of which there is one
        mode: CUDAGraphMode,
    ) -> torch.Tensor:
        """Run the head over the first `tokens` of the input buffers: `[tokens, hidden]`."""

    def _generate(
        self,
        k: int,
        count: int,
        tokens: int,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        across: torch.Tensor | None,
        mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """Run the pass from input buffers to `draft_tokens`: what a graph records."""
        combined = self.model.combine_hidden_states(self._gathered[:tokens])
        rows = self._rows[: len(FIELDS) * count].view(-1, count)
        inputs_triton.spread(rows, combined, self._mask_state, self.hidden_states[:tokens])
        last = self._forward(tokens, metadata, slot_mappings, across, mode)
        if k:
            drafting = last[self._drafts[: count * k]]
            # The text of a request ends at `end` in this pass: there its newest token is.
            slots, ends = rows[FIELDS.index("slot")], rows[FIELDS.index("end")]
            self.draft_tokens[:count, :k] = self._choose(drafting, slots, ends).view(count, k)

    def _choose(
        self,
        hidden: torch.Tensor,  # [requests * drafts, hidden], a request's drafts in succession
        slots: torch.Tensor,  # [requests], -1 where padded
        positions: torch.Tensor,  # [requests], of the token before the request's first draft
    ) -> torch.Tensor:
        """Draft tokens of hidden states: `[requests * drafts]`, the most probable ones of greedy
        requests, drawn as the target's tokens are for others. Under tensor parallelism all are the
        most probable ones: ranks exchange one token of each draft, not its logits."""
        lm_head = self.model.lm_head
        if self.sampling is None or lm_head.tp_size > 1:
            return greedy_draft_tokens(self.model, lm_head, hidden)
        logits = self.model.logits_processor(lm_head, hidden)
        tokens = most_probable(self.model, logits)
        self.sampling.draw(tokens, logits, self._target_ids, slots, positions)
        return tokens

    def _device(self, values: Ints) -> torch.Tensor:
        """Copy to the device without waiting for it, from pinned memory on CUDA."""
        pinned = torch.from_numpy(values)
        if self.device.type == "cuda":
            pinned = pinned.pin_memory()
        return pinned.to(self.device, non_blocking=True)


def _kernel_blocks(groups: Sequence[AttentionGroup]) -> dict[str, int]:
    """Tokens in a block as each layer's attention kernel addresses it, by the layer's name."""
    return {
        name: group.kernel_block_size or group.kv_cache_spec.block_size
        for group in groups
        for name in group.layer_names
    }
