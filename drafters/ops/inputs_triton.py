"""The drafting inputs on a GPU, around `fc`: two launches, from arrays of one entry per request.

    enter   ids, positions and KV cache slots of every token; the hidden states of entered ones
    spread  the rows that `fc` made, and the shared hidden state in masked slots

A token finds its request by bisection of where requests begin. Each hidden state is read and
written once: 2 * taps * hidden elements per entered token in `enter`, 2 * hidden per token in
`spread`, and 20 bytes of integers. Served by drafters/vllm/v2; not timed on a GPU yet.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments have types only when it is compiled.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import triton
import triton.language as tl

from drafters.ops.reference import Requests

COLUMNS = 1024  # of a hidden state, for each program
STEPS = 13  # of the bisection: 8,192 requests. One number, or each size of a batch is compiled anew
MOST_TAPS = 3
_FIELDS = [field.name for field in fields(Requests)]  # rows of the packed array, in this order


@triton.jit
def _owner(rows, count, token, STEPS: tl.constexpr):
    """The last request that begins at or before `token`; `begin` is row 6 of `rows`."""
    owner = 0
    for step in tl.static_range(STEPS):
        middle = owner + (1 << (STEPS - 1 - step))
        begin = tl.load(rows + 6 * count + middle, mask=middle < count, other=token + 1)
        owner = tl.where(begin <= token, middle, owner)
    return owner


@triton.jit(do_not_specialize=["count"])
def enter_kernel(
    rows, count, tokens, longest, tables, blocks, starts, state0, state1, state2, hidden,
    store, ids, positions, slots, gathered, block_size, window, mask_token,
    TAPS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    owner = _owner(rows, count, token, STEPS)
    index = tl.load(rows + owner)
    kept = index >= 0
    index = tl.maximum(index, 0)
    slot = tl.load(rows + count + owner)
    start = tl.load(rows + 2 * count + owner)
    scheduled = tl.load(rows + 3 * count + owner)
    end = tl.load(rows + 4 * count + owner)
    offset = token - tl.load(rows + 6 * count + owner)
    position = start + offset
    if tl.program_id(1) == 0:
        following = tl.load(tokens + slot * longest + position + 1, mask=position + 1 < end)
        newest = tl.load(rows + 5 * count + owner)
        id = tl.where(position == end - 1, newest.to(tl.int32), following)
        tl.store(ids + token, tl.where(position >= end, mask_token, id))
        tl.store(positions + token, tl.minimum(position, longest - 1))
        inside = kept & (position < longest)
        block = tl.load(tables + index * blocks + position // block_size, mask=inside, other=0)
        at = block.to(tl.int64) * block_size + position % block_size
        tl.store(slots + token, tl.where(inside, at, -1))
    if position < end:
        entry = tl.load(rows + 7 * count + owner) + offset
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        held = position < scheduled
        # The side that is not read has no columns.
        old_columns, new_columns = tl.where(held, hidden, 0), tl.where(held, 0, hidden)
        before = (slot * window + position % window) * TAPS * hidden
        row = (tl.load(starts + index) + position - scheduled) * hidden
        for tap in tl.static_range(TAPS):
            state = state0 if tap == 0 else (state1 if tap == 1 else state2)
            old = tl.load(store + before + tap * hidden + column, mask=column < old_columns)
            new = tl.load(state + row + column, mask=column < new_columns)
            target = gathered + (entry * TAPS + tap) * hidden + column
            tl.store(target, tl.where(held, old, new), mask=column < hidden)


@triton.jit(do_not_specialize=["count"])
def spread_kernel(
    rows, count, combined, shared, out, hidden, STEPS: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    owner = _owner(rows, count, token, STEPS)
    offset = token - tl.load(rows + 6 * count + owner)
    length = tl.load(rows + 4 * count + owner) - tl.load(rows + 2 * count + owner)
    entry = tl.load(rows + 7 * count + owner) + offset
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    entered = offset < length
    own_columns, shared_columns = tl.where(entered, hidden, 0), tl.where(entered, 0, hidden)
    own = tl.load(combined + entry * hidden + column, mask=column < own_columns)
    other = tl.load(shared + column, mask=column < shared_columns)
    tl.store(out + token * hidden + column, tl.where(entered, own, other), mask=column < hidden)


def pack(found: Requests) -> torch.Tensor:
    """`[8, requests]` int64: one copy to the device for all."""
    return torch.stack([getattr(found, name) for name in _FIELDS])


def enter(
    rows: torch.Tensor,  # of `pack`
    *,
    tokens: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    states: Sequence[torch.Tensor],
    store: torch.Tensor,
    block_size: int,
    window: int,
    mask_token: int,
    ids: torch.Tensor,  # the rest is written: [tokens of the pass] int32,
    positions: torch.Tensor,  # int64,
    slots: torch.Tensor,  # int64
    gathered: torch.Tensor,  # [entries, taps * hidden]
) -> None:
    """`reference.enter` into buffers that are exactly as long as the pass."""
    taps, hidden = len(states), states[0].shape[1]
    if not 1 <= taps <= MOST_TAPS:
        raise ValueError(f"{taps} taps: the kernel takes 1 to {MOST_TAPS}")
    count = _check(rows)
    assert ids.shape == positions.shape == slots.shape
    assert (ids.dtype, positions.dtype, slots.dtype) == (torch.int32, torch.int64, torch.int64)
    assert all(x.dtype == torch.int32 for x in (tokens, tables, starts))
    assert gathered.shape[1] == store.shape[1] == taps * hidden
    assert all(state.shape == states[0].shape for state in states)
    assert {x.dtype for x in (*states, store)} == {gathered.dtype}
    written = (ids, positions, slots, gathered)
    assert all(x.is_contiguous() for x in (tokens, tables, starts, store, *states, *written))
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    enter_kernel[(len(ids), triton.cdiv(hidden, columns))](
        rows, count, tokens, tokens.shape[1], tables, tables.shape[1], starts,
        states[0], states[min(1, taps - 1)], states[min(2, taps - 1)], hidden, store,
        ids, positions, slots, gathered, block_size, window, mask_token,
        TAPS=taps, STEPS=STEPS, COLUMNS=columns,
    )  # fmt: skip


def spread(
    rows: torch.Tensor, combined: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """`reference.spread` into `out`, `[tokens of the pass, hidden]`."""
    count, hidden = _check(rows), combined.shape[1]
    assert out.shape[1] == hidden and shared.shape == (hidden,)
    assert combined.dtype == shared.dtype == out.dtype
    assert combined.is_contiguous() and shared.is_contiguous() and out.is_contiguous()
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    spread_kernel[(len(out), triton.cdiv(hidden, columns))](
        rows, count, combined, shared, out, hidden, STEPS=STEPS, COLUMNS=columns
    )


def _check(rows: torch.Tensor) -> int:
    assert rows.dtype == torch.int64 and rows.is_contiguous() and rows.shape[0] == len(_FIELDS)
    assert rows.shape[1] < 1 << STEPS
    return rows.shape[1]
