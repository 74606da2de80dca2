"""Implementations of the way from the target's hidden states to the head's inputs, without `fc`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.kernels.clock import Arm
from drafters.ops.gather import gather
from drafters.vllm.v1.layout import Rows, lay_out

TAPS, BLOCK, MASK, CONTEXT, WINDOW = 3, 16, 3, 200, 256


def inputs(batch: int, k: int, hidden: int, dtype: torch.dtype, device: str) -> dict[str, Arm]:
    """Arms for one step of `batch` requests, which verified `k` drafts each."""
    every, read = np.arange(batch, dtype=np.int64), k + 1
    accepted = k // 2 + 1  # with the target's own token
    rows = Rows(every, every, every * 0, every * 0 + CONTEXT, every * 0 + CONTEXT,
                every * 0 + CONTEXT + accepted, every * 0 + k, every + 7)  # fmt: skip
    blocks = (CONTEXT + 2 * read) // BLOCK + 1
    given: dict[str, Any] = {
        "tokens": np.random.default_rng(0).integers(4, 4000, (batch, 4096)).astype(np.int32),
        "tables": np.random.default_rng(1).permutation(batch * blocks).reshape(batch, blocks),
        "query_start_loc": (np.arange(batch + 1) * read).astype(np.int32),
        "block_size": BLOCK, "window": WINDOW, "mask_token": MASK,
    }  # fmt: skip
    given["tables"] = given["tables"].astype(np.int32)
    states = [torch.randn(batch * read, hidden).to(device, dtype) for _ in range(TAPS)]
    shared = torch.randn(hidden).to(device, dtype)
    entered, tokens = batch * accepted, batch * (accepted + k - 1)
    combined = torch.randn(batch * read, hidden).to(device, dtype)
    longest = batch * 2 * read
    ids = torch.zeros(longest, dtype=torch.int32, device=device)
    positions = torch.zeros(longest, dtype=torch.int64, device=device)
    buffer = torch.zeros((longest, hidden), dtype=dtype, device=device)
    each = hidden * states[0].element_size()

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    def served() -> None:  # what drafters/vllm/v1/drafter.py does
        layout = lay_out(rows, **given)
        ids[:tokens], positions[:tokens] = put(layout.ids), put(layout.positions)
        chosen = put(layout.fresh_from)
        torch.cat([state.index_select(0, chosen) for state in states], dim=-1)
        buffer[put(layout.fresh)] = combined[:entered]
        if layout.masked.size:
            buffer[put(layout.masked)] = shared
        put(layout.slots)

    gathered = torch.empty((entered, TAPS * hidden), dtype=dtype, device=device)

    nothing_kept = torch.empty((0, TAPS * hidden), dtype=dtype, device=device)

    def once() -> None:  # as `served`, with every hidden state copied once
        layout = lay_out(rows, **given)
        ids[:tokens].copy_(put(layout.ids))
        positions[:tokens].copy_(put(layout.positions))
        chosen = put(layout.fresh_from)
        gather(states, chosen, nothing_kept, chosen[:0], gathered)
        buffer.index_copy_(0, put(layout.fresh), combined[:entered])
        if layout.masked.size:
            buffer.index_copy_(0, put(layout.masked), shared.expand(len(layout.masked), -1))
        put(layout.slots)

    def host() -> None:  # only the integers of the layout
        lay_out(rows, **given)

    spread = (2 * entered + tokens - entered) * each
    arms: dict[str, Arm] = {
        "served": Arm(served, 4 * TAPS * entered * each + spread),
        "once": Arm(once, 2 * TAPS * entered * each + spread),
        "layout": Arm(host, 20 * tokens),
    }
    if device == "cpu" or find_spec("vllm"):
        stock = _stock(given, states, combined, shared, k, batch, ids, positions, buffer)
        total, width = batch * read, batch * (read + k - 1)
        moved = 2 * (TAPS + 1) * total * each + 2 * width * each
        arms = {"vllm": Arm(stock, moved), **arms}
    if device != "cpu":
        arms["triton"] = fused(given, states, shared, accepted, k, ids, positions, buffer)
    return arms


def fused(
    given: dict[str, Any], states: list[torch.Tensor], shared: torch.Tensor, accepted: int, k: int,
    ids: torch.Tensor, positions: torch.Tensor, buffer: torch.Tensor,
) -> Arm:  # fmt: skip
    """The arm of drafters/vllm/v2, where the host does not know what was accepted."""
    from drafters.ops import inputs_triton

    device, hidden = buffer.device, buffer.shape[1]
    batch, read = len(given["query_start_loc"]) - 1, k + 1
    width = read + k - 1
    total, each = batch * width, hidden * buffer.element_size()
    every = torch.arange(batch, device=device)
    host_rows = torch.stack([every * width, every * 0 + width, every * 0, every * 0 + width])
    there = {
        name: torch.from_numpy(given[name]).to(device) for name in ("tokens", "query_start_loc")
    }
    tables = torch.from_numpy(given["tables"]).to(device)
    step = (torch.arange(read, device=device) + CONTEXT).repeat(batch)
    rejected = torch.full((batch,), read - accepted, dtype=torch.int32, device=device)
    rows = torch.zeros((len(inputs_triton.FIELDS), batch), dtype=torch.int64, device=device)
    queries = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    lengths, slots = torch.zeros_like(queries[1:]), torch.zeros_like(every.repeat(width))
    drafts = torch.zeros((batch, k), dtype=torch.int64, device=device)
    store = buffer.new_empty((batch * WINDOW, TAPS * hidden))
    gathered, combined = buffer.new_empty((total, TAPS * hidden)), torch.randn_like(buffer[:total])

    def launch() -> None:
        inputs_triton.plan(
            host_rows, slots=every, positions=step, rejected=rejected, total=total,
            max_model_len=there["tokens"].shape[1], kept=True, rows=rows, queries=queries,
            lengths=lengths, drafts=drafts, **there,
        )  # fmt: skip
        inputs_triton.enter(
            rows, tables=tables, states=states, store=store, block_size=BLOCK, window=WINDOW,
            mask_token=MASK, ids=ids[:total], positions=positions[:total], slots=slots,
            gathered=gathered, **there,
        )  # fmt: skip
        inputs_triton.spread(rows, combined, shared, buffer[:total])

    moved = (2 * TAPS * batch * accepted + batch * accepted + total) * each
    return Arm(launch, moved, on_device=True)


def _stock(
    given: dict[str, Any], states: list[torch.Tensor], combined: torch.Tensor,
    shared: torch.Tensor, k: int, batch: int, ids: torch.Tensor, positions: torch.Tensor,
    buffer: torch.Tensor,
) -> Callable[[], None]:  # fmt: skip
    """vLLM's way: concatenate the taps as its runner does, then `set_inputs_first_pass`."""
    _prepare_vllm()
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    device, read = combined.device, k + 1
    query_start_loc = torch.from_numpy(given["query_start_loc"])
    proposer = SimpleNamespace(
        use_heterogeneous_vocab=False, needs_extra_input_slots=True,
        net_num_new_slots_per_request=k - 1, extra_slots_per_request=k, device=device,
        input_ids=ids, positions=positions, hidden_states=buffer, block_size=BLOCK,
        is_rejected_token_mask=torch.zeros(len(ids), dtype=torch.bool, device=device),
        is_masked_token_mask=torch.zeros(len(ids), dtype=torch.bool, device=device),
        parallel_drafting_token_id=MASK, pass_hidden_states_to_model=True,
        parallel_drafting_hidden_state_tensor=shared, max_model_len=4096,
        arange=torch.arange(4096, dtype=torch.int32, device=device),
    )  # fmt: skip
    common = CommonAttentionMetadata(
        query_start_loc=query_start_loc.to(device), query_start_loc_cpu=query_start_loc,
        seq_lens=torch.full((batch,), CONTEXT + read, dtype=torch.int32, device=device),
        num_reqs=batch, num_actual_tokens=batch * read, max_query_len=read,
        max_seq_len=CONTEXT + read, block_table_tensor=torch.from_numpy(given["tables"]).to(device),
        slot_mapping=torch.zeros(batch * read, dtype=torch.int64, device=device),
    )  # fmt: skip
    target_ids = torch.full((batch * read,), 9, dtype=torch.int32, device=device)
    places = (torch.arange(read, device=device) + CONTEXT).repeat(batch)
    newest = torch.arange(batch, dtype=torch.int32, device=device)
    rejected = torch.full((batch,), k - k // 2, dtype=torch.int32, device=device)

    def stock() -> None:
        torch.cat(states, dim=-1)
        SpecDecodeBaseProposer.set_inputs_first_pass(
            proposer, target_ids, newest, places, combined, None, common, rejected
        )

    return stock


@cache
def _prepare_vllm() -> None:
    """Import kernels as a worker does before the proposer: C++ replaces Triton on a CPU."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
