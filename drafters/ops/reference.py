"""What the kernels compute, in plain torch: their specification, with which tests compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MOST_TAPS = 5  # that the kernels take: each has an argument of its own
MOST_REQUESTS = 8191  # that a token's search for its request tells apart


@dataclass(frozen=True)
class Requests:
    """The requests of a pass, int64 `[requests]` each: `drafters.vllm.v1.layout.Rows` as tensors,
    and where their tokens begin. Every request has at least one token."""

    index: torch.Tensor  # row in the batch
    slot: torch.Tensor  # row in the store, and among the tokens
    start: torch.Tensor  # positions start..end-1 are entered in this pass
    num_computed_tokens: torch.Tensor  # hidden states of positions from here on came with this step
    end: torch.Tensor  # positions from here on are masked positions
    stop: torch.Tensor  # keys and values of positions from here on are not stored
    newest: torch.Tensor  # the token at `end`
    query_start: torch.Tensor  # its first token in the pass


def plan(
    host_rows: torch.Tensor,  # int64 [4, requests], what the host knows of each: see below
    *,
    slots: torch.Tensor,  # [requests]
    query_start_loc: torch.Tensor,  # [requests + 1], first row of each request in the step
    positions: torch.Tensor,  # of the step's rows
    rejected: torch.Tensor | None,  # [requests]; None: the step's own tokens are not entered
    tokens: torch.Tensor,  # [slots, longest]
    total: int,  # tokens of the pass
    max_model_len: int,  # the most tokens of a request: `longest`, or fewer
    k: int,
    padded: int,  # requests of the graph that the pass runs in
    kept: bool = True,  # False: a dummy run, which stores nothing in the KV cache
) -> tuple[Requests, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay out a pass when only the device knows how many drafts were accepted. Returns
    `(requests, queries int32 [padded + 1], lengths int32 [padded], drafts int64 [padded, k])`.

    `host_rows` has four rows: `query_start`, where the tokens of each request begin in the pass;
    `query_len`, how many they are; `held`, of how many the hidden states are in the store; and
    `unpadded_len`, which is `query_len` without padding. `queries` is where requests begin,
    `lengths` how many tokens each attends to at its last, `drafts` the tokens to draft from.
    Requests that pad the graph begin behind all tokens, have slot -1 and are zero otherwise.
    Nothing is stored of a request whose part would end beyond `max_model_len`, and its drafts mean
    nothing: up to about K tokens before that length it is no longer drafted for.
    """
    query_start, query_len, held, unpadded_len = host_rows
    count, longest = len(query_start), tokens.shape[1]
    none = query_start.new_zeros(padded - count)
    num_computed_tokens = positions[query_start_loc[:count].long()]
    end = num_computed_tokens
    if rejected is not None:
        end = end + query_start_loc.diff() - rejected
    start, slot = num_computed_tokens - held, slots.long()
    length = start + query_len
    inside = length <= max_model_len
    last = query_start + end - start - 1
    drafts = last[:, None] + torch.arange(k, device=last.device)
    found = {
        "index": torch.arange(count, device=query_start.device),
        "slot": slot,
        "start": start,
        "num_computed_tokens": num_computed_tokens,
        "end": end,
        "stop": (start + unpadded_len).where(inside & kept, 0),
        "newest": tokens[slot, end.clamp(max=longest - 1)].long(),
    }
    queries = torch.cat([query_start, none.new_full((padded - count + 1,), total)])
    padding = dict.fromkeys(found, none) | {"slot": none - 1}
    return (
        Requests(
            **{name: torch.cat([x, padding[name]]) for name, x in found.items()},
            query_start=queries[:-1],
        ),
        queries.int(),
        torch.cat([length.where(inside, query_len), none]).int(),
        torch.cat([drafts, none.new_zeros(padded - count, k)]),
    )


def owners(found: Requests, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of `count` tokens, `[count]`: its request, its position, whether it is a masked
    slot."""
    token = torch.arange(count, device=found.query_start.device)
    owner = torch.searchsorted(found.query_start, token, right=True) - 1
    position = found.start[owner] + token - found.query_start[owner]
    return owner, position, position >= found.end[owner]


def enter(
    found: Requests,
    count: int,
    *,
    tokens: torch.Tensor,  # [slots, longest] int32, without `newest`
    tables: torch.Tensor,  # [batch, blocks] int32
    query_start_loc: torch.Tensor,  # [batch + 1] int32, first row of each request in the step
    states: Sequence[torch.Tensor],  # taps of [rows of the step, hidden]
    store: torch.Tensor,  # [slots * window, taps * hidden], a ring for each slot
    block_size: int,
    window: int,
    mask_token: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of a pass of `count` tokens: ids int32 `[count]`, positions and KV cache slots
    int64 `[count]`, and the target's hidden states of entered tokens `[count, taps * hidden]`,
    zero in masked positions. The slot is -1 where nothing is stored. Positions are clamped to below
    `longest`; no `stop` may be above it."""
    owner, position, masked = owners(found, count)
    longest, index, slot = tokens.shape[1], found.index[owner], found.slot[owner]
    ids = tokens[slot, (position + 1).clamp(max=longest - 1)]
    ids = torch.where(position == found.end[owner] - 1, found.newest[owner].int(), ids)
    ids = ids.masked_fill(masked, mask_token)
    block = (position // block_size).clamp(max=tables.shape[1] - 1)
    slots = tables[index, block].long() * block_size + position % block_size
    slots = slots.where(position < found.stop[owner], -1)
    held = position < found.num_computed_tokens[owner]
    row = query_start_loc[index] + position - found.num_computed_tokens[owner]
    row = row.masked_fill(held | masked, 0)
    kept = (slot * window + position % window).masked_fill(~held, 0)
    fresh = torch.cat([state[row] for state in states], dim=-1)
    gathered = torch.where(held[:, None], store[kept], fresh).masked_fill(masked[:, None], 0)
    return ids, position.clamp(max=longest - 1), slots, gathered


def spread(
    found: Requests, combined: torch.Tensor, shared: torch.Tensor, count: int
) -> torch.Tensor:
    """The head's hidden states for `count` tokens, `[count, hidden]`: rows of `combined`
    `[count, hidden]` for entered tokens, `shared` `[hidden]` in masked positions."""
    _, _, masked = owners(found, count)
    return torch.where(masked[:, None], shared, combined)
