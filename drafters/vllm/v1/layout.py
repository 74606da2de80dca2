"""The layout of a drafter pass: which tokens of which requests, in which order.

A request's part of a pass is the positions that are entered (kv_state.py), then for P-EAGLE
(arXiv 2602.01469, section 3) one masked position for each draft token after the first:

    positions   start .. end-1   end .. end+k-2
    token       the next one     the mask token
    hidden      the target's     the shared one
    draft from  the last one     all

EAGLE-3 has no masked positions. Its draft tokens after the first come from passes of their own
(`following`).

All of it is computed on the host, which knows a step's accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The requests of a pass: `[requests]` each."""

    index: Ints  # row in the runner's batch
    slot: Ints  # row in DrafterKVState and in the store
    context_start: Ints  # where the drafter's context begins
    start: Ints  # positions start..end-1 are entered in this pass
    num_computed_tokens: Ints  # before this step, in which the target read positions from here on
    end: Ints
    k: Ints  # draft tokens wanted, 0 for a request in prefill
    newest: Ints  # the token at `end`


@dataclass(frozen=True)
class Layout:
    """The tokens of a pass, `[tokens]` unless said otherwise."""

    ids: npt.NDArray[np.int32]
    positions: Ints
    slots: Ints  # where keys and values go in the KV cache
    queries: npt.NDArray[np.int32]  # [requests + 1], first token of each request
    context: npt.NDArray[np.int32]  # [requests], tokens attended to, from `first`
    masked: Ints  # [masks], tokens that are masked positions
    held: Ints  # [held], tokens whose hidden state was stored in an earlier step
    held_from: Ints  # [held], their rows in the store
    fresh: Ints  # [fresh], tokens whose hidden state came with this step
    fresh_from: Ints  # [fresh], their rows in this step's hidden states
    drafts: Ints  # [sum of k], tokens to draft from, request by request


def lay_out(
    rows: Rows,
    *,
    tokens: npt.NDArray[np.int32],  # [batch, longest], tokens of the requests, without `newest`
    tables: npt.NDArray[np.int32],  # [batch, blocks]
    query_start_loc: npt.NDArray[np.int32],  # [batch + 1], first row of each request in the step
    block_size: int,
    window: int,
    mask_token: int,
) -> Layout:
    """The tokens of a pass over `rows`, of which each has `end > start`."""
    entered = rows.end - rows.start
    lengths = entered + np.maximum(rows.k - 1, 0)
    queries = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=queries[1:])
    query_start = queries[:-1].astype(np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(queries[-1]) + (rows.start - query_start)[owner]
    index = rows.index[owner]

    ids = tokens[index, np.minimum(positions + 1, tokens.shape[1] - 1)]
    last = query_start + entered - 1
    ids[last] = rows.newest
    is_mask = positions >= rows.end[owner]
    masked = np.flatnonzero(is_mask)
    ids[masked] = mask_token

    is_held = positions < rows.num_computed_tokens[owner]
    held = np.flatnonzero(is_held)
    fresh = np.flatnonzero(~is_held & ~is_mask)
    drafts = np.repeat(last - (np.cumsum(rows.k) - rows.k), rows.k) + np.arange(rows.k.sum())
    return Layout(
        ids=ids,
        positions=positions,
        slots=tables[index, positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        queries=queries,
        context=(rows.start + lengths - rows.context_start).astype(np.int32),
        masked=masked,
        held=held,
        held_from=stored(rows.slot[owner[held]], positions[held], window),
        fresh=fresh,
        fresh_from=query_start_loc[index[fresh]]
        + positions[fresh]
        - rows.num_computed_tokens[owner[fresh]],
        drafts=drafts,
    )


def following(rows: Rows, which: Ints, depth: int) -> Rows:
    """The requests `which` of `rows` in the pass that drafts one more token after `depth` draft
    tokens each. It reads the newest of them alone, at the position before its own. `newest` is 0,
    as only the device knows the token.
    """
    end = rows.end[which] + depth
    return Rows(
        index=rows.index[which],
        slot=rows.slot[which],
        context_start=rows.context_start[which],
        start=end - 1,
        num_computed_tokens=end - 1,
        end=end,
        k=np.ones_like(end),
        newest=np.zeros_like(end),
    )


def stored(slots: Ints, positions: Ints, window: int) -> Ints:
    """Row of the hidden state of a position in the store, which has a ring for each request."""
    return slots * window + positions % window
