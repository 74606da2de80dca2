"""The inputs of a P-EAGLE pass on a GPU: three kernels, whose inputs have one entry per request.

    plan    where each request's tokens begin and end, from what the device knows of the step
    enter   ids, positions and KV cache slots of every token; the hidden states of entered ones
    spread  the rows that `fc` made, and the shared hidden state in masked positions

A token finds its request by a binary search of `query_start`. Each hidden state is read and written
once: 2 * taps * hidden elements per entered token in `enter`, 2 * hidden per token in `spread`, and
20 bytes of integers; in `plan` 72 bytes per request and 8 per draft. drafters/vllm/v2 uses them.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments get types only when it is compiled.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import triton
import triton.language as tl

from drafters.ops.reference import MOST_REQUESTS, MOST_TAPS, Requests

COLUMNS = 1024  # elements of a hidden state that one program copies
# Of the search; constant, else each batch size compiles a kernel.
STEPS = MOST_REQUESTS.bit_length()
DRAFTS = 32  # most of a request in a pass; constant, else a larger K compiles a kernel in service
FIELDS = [field.name for field in fields(Requests)]  # rows of the packed array, in this order


@triton.jit
def _owner(rows, count, token, STEPS: tl.constexpr):
    """The last request that begins at or before `token`; `query_start` is row 7 of `rows`."""
    owner = 0
    for step in tl.static_range(STEPS):
        middle = owner + (1 << (STEPS - 1 - step))
        query_start = tl.load(rows + 7 * count + middle, mask=middle < count, other=token + 1)
        owner = tl.where(query_start <= token, middle, owner)
    return owner


@triton.jit(do_not_specialize=["count", "padded", "total", "k", "kept"])
def plan_kernel(
    host_rows, count, padded, total, slots, query_start_loc, positions, rejected, tokens, longest,
    max_model_len, rows, queries, lengths, drafts, k, kept,
    FRESH: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Lay out a pass: one program for each request."""
    request = tl.program_id(0)
    here, written = request < count, request < padded
    query_start = tl.load(host_rows + request, mask=here, other=total)
    query_len = tl.load(host_rows + count + request, mask=here, other=0)
    held = tl.load(host_rows + 2 * count + request, mask=here, other=0)
    unpadded_len = tl.load(host_rows + 3 * count + request, mask=here, other=0)
    slot = tl.load(slots + request, mask=here, other=0).to(tl.int64)
    row = tl.load(query_start_loc + request, mask=here, other=0)
    num_computed_tokens = tl.load(positions + row, mask=here, other=0)
    end = num_computed_tokens
    if FRESH:
        read = tl.load(query_start_loc + request + 1, mask=here, other=0) - row
        end += read - tl.load(rejected + request, mask=here, other=0)
    start = num_computed_tokens - held
    length = start + query_len
    inside = length <= max_model_len
    last = tl.minimum(end, longest - 1)
    newest = tl.load(tokens + slot * longest + last, mask=here, other=0).to(tl.int64)
    stop = tl.where(inside & here, start + unpadded_len, 0) * kept
    tl.store(queries + request, query_start.to(tl.int32))
    tl.store(lengths + request, tl.where(inside, length, query_len).to(tl.int32), mask=written)
    rows += request
    tl.store(rows, tl.where(here, request, 0).to(tl.int64), mask=written)
    tl.store(rows + padded, tl.where(here, slot, -1), mask=written)
    tl.store(rows + 2 * padded, start, mask=written)
    tl.store(rows + 3 * padded, num_computed_tokens, mask=written)
    tl.store(rows + 4 * padded, end, mask=written)
    tl.store(rows + 5 * padded, stop, mask=written)
    tl.store(rows + 6 * padded, newest, mask=written)
    tl.store(rows + 7 * padded, query_start, mask=written)
    draft = tl.arange(0, DRAFTS)
    source = tl.where(here, query_start + end - start - 1 + draft, 0)
    tl.store(drafts + request * k + draft, source, mask=draft < tl.where(written, k, 0))


@triton.jit(do_not_specialize=["count"])
def enter_kernel(
    rows, count, tokens, longest, tables, blocks, query_start_loc,
    state0, state1, state2, state3, state4, hidden,
    store, ids, positions, slots, gathered, block_size, window, mask_token,
    TAPS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fill token ids, positions, slots and hidden states: one program for each token."""
    token = tl.program_id(0).to(tl.int64)
    owner = _owner(rows, count, token, STEPS)
    index = tl.load(rows + owner)
    slot = tl.load(rows + count + owner)
    start = tl.load(rows + 2 * count + owner)
    num_computed_tokens = tl.load(rows + 3 * count + owner)
    end = tl.load(rows + 4 * count + owner)
    position = start + token - tl.load(rows + 7 * count + owner)
    if tl.program_id(1) == 0:
        following = tl.load(tokens + slot * longest + position + 1, mask=position + 1 < end)
        newest = tl.load(rows + 6 * count + owner)
        id = tl.where(position == end - 1, newest.to(tl.int32), following)
        tl.store(ids + token, tl.where(position >= end, mask_token, id))
        tl.store(positions + token, tl.minimum(position, longest - 1))
        inside = position < tl.load(rows + 5 * count + owner)
        block = tl.load(tables + index * blocks + position // block_size, mask=inside, other=0)
        at = block.to(tl.int64) * block_size + position % block_size
        tl.store(slots + token, tl.where(inside, at, -1))
    if position < end:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        held = position < num_computed_tokens
        # Only one of store and step is read: the mask of the other has no columns.
        old_columns, new_columns = tl.where(held, hidden, 0), tl.where(held, 0, hidden)
        before = (slot * window + position % window) * TAPS * hidden
        row = (tl.load(query_start_loc + index) + position - num_computed_tokens) * hidden
        for tap in tl.static_range(TAPS):
            early = state0 if tap == 0 else (state1 if tap == 1 else state2)
            state = early if tap < 3 else (state3 if tap == 3 else state4)
            old = tl.load(store + before + tap * hidden + column, mask=column < old_columns)
            new = tl.load(state + row + column, mask=column < new_columns)
            target = gathered + (token * TAPS + tap) * hidden + column
            tl.store(target, tl.where(held, old, new), mask=column < hidden)


@triton.jit(do_not_specialize=["count"])
def spread_kernel(
    rows, count, combined, shared, out, hidden, STEPS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Copy combined states to their tokens, the shared state to masked positions."""
    token = tl.program_id(0).to(tl.int64)
    owner = _owner(rows, count, token, STEPS)
    offset = token - tl.load(rows + 7 * count + owner)
    length = tl.load(rows + 4 * count + owner) - tl.load(rows + 2 * count + owner)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    entered = offset < length
    own_columns, shared_columns = tl.where(entered, hidden, 0), tl.where(entered, 0, hidden)
    own = tl.load(combined + token * hidden + column, mask=column < own_columns)
    other = tl.load(shared + column, mask=column < shared_columns)
    tl.store(out + token * hidden + column, tl.where(entered, own, other), mask=column < hidden)


def pack(found: Requests) -> torch.Tensor:
    """All fields in one int64 `[fields, requests]`, so that one copy to the device is enough."""
    return torch.stack([getattr(found, name) for name in FIELDS])


def plan(
    host_rows: torch.Tensor,
    *,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    rejected: torch.Tensor | None,
    tokens: torch.Tensor,
    total: int,
    max_model_len: int,
    kept: bool,
    rows: torch.Tensor,  # written, like the next three: [fields, padded], as `pack` returns it
    queries: torch.Tensor,  # int32 [padded + 1]
    lengths: torch.Tensor,  # int32 [padded]
    drafts: torch.Tensor,  # int64 [padded, k]
) -> None:
    """Compute `reference.plan` with one kernel, into the caller's buffers."""
    count, (padded, k) = host_rows.shape[1], drafts.shape
    assert host_rows.shape[0] == 4 and _check(rows) == len(lengths) == len(queries) - 1 == padded
    assert len(query_start_loc) == count + 1 and len(slots) == count and k <= DRAFTS
    assert (host_rows.dtype, positions.dtype, drafts.dtype) == (torch.int64,) * 3
    assert all(x.dtype == torch.int32 for x in (query_start_loc, tokens, queries, lengths))
    every = (host_rows, slots, query_start_loc, positions, tokens, queries, lengths, drafts)
    assert all(x.is_contiguous() for x in every)
    plan_kernel[(padded + 1,)](
        host_rows, count, padded, total, slots, query_start_loc, positions, rejected, tokens,
        tokens.shape[1], max_model_len, rows, queries, lengths, drafts, k, int(kept),
        FRESH=rejected is not None, DRAFTS=DRAFTS,
    )  # fmt: skip


def enter(
    rows: torch.Tensor,  # [fields, requests], as `pack` returns it
    *,
    tokens: torch.Tensor,
    tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    states: Sequence[torch.Tensor],
    store: torch.Tensor,
    block_size: int,
    window: int,
    mask_token: int,
    ids: torch.Tensor,  # written, like the next three: int32 [tokens of the pass]
    positions: torch.Tensor,  # int64 [tokens of the pass]
    slots: torch.Tensor,  # int64 [tokens of the pass]
    gathered: torch.Tensor,  # [tokens of the pass, taps * hidden], masked ones left as they are
) -> None:
    """Compute `reference.enter` into buffers that are exactly as long as the pass."""
    taps, hidden = len(states), states[0].shape[1]
    if not 1 <= taps <= MOST_TAPS:
        raise ValueError(f"{taps} taps: the kernel takes 1 to {MOST_TAPS}")
    count = _check(rows)
    assert ids.shape == positions.shape == slots.shape
    assert (ids.dtype, positions.dtype, slots.dtype) == (torch.int32, torch.int64, torch.int64)
    assert all(x.dtype == torch.int32 for x in (tokens, tables, query_start_loc))
    assert gathered.shape[1] == store.shape[1] == taps * hidden
    assert all(state.shape == states[0].shape for state in states)
    assert {x.dtype for x in (*states, store)} == {gathered.dtype}
    written = (ids, positions, slots, gathered)
    every = (tokens, tables, query_start_loc, store, *states, *written)
    assert all(x.is_contiguous() for x in every)
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    enter_kernel[(len(ids), triton.cdiv(hidden, columns))](
        rows, count, tokens, tokens.shape[1], tables, tables.shape[1], query_start_loc,
        *(states[min(tap, taps - 1)] for tap in range(MOST_TAPS)), hidden, store,
        ids, positions, slots, gathered, block_size, window, mask_token,
        TAPS=taps, STEPS=STEPS, COLUMNS=columns,
    )  # fmt: skip


def spread(
    rows: torch.Tensor, combined: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute `reference.spread` into `out`, `[tokens of the pass, hidden]`."""
    count, hidden = _check(rows), combined.shape[1]
    assert out.shape[1] == hidden and shared.shape == (hidden,)
    assert combined.dtype == shared.dtype == out.dtype
    assert combined.is_contiguous() and shared.is_contiguous() and out.is_contiguous()
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    spread_kernel[(len(out), triton.cdiv(hidden, columns))](
        rows, count, combined, shared, out, hidden, STEPS=STEPS, COLUMNS=columns
    )


def _check(rows: torch.Tensor) -> int:
    assert rows.dtype == torch.int64 and rows.is_contiguous() and rows.shape[0] == len(FIELDS)
    assert rows.shape[1] < 1 << STEPS
    return rows.shape[1]
