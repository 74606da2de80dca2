"""What the kernels compute, in plain torch: the specification that tests hold them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Requests:
    """The requests of a pass, `[requests]` of int64 each: `drafters.vllm.layout.Rows` as tensors,
    and where their tokens begin. Every request has tokens: `end > start`."""

    index: torch.Tensor  # row in the batch
    slot: torch.Tensor  # row in the store
    start: torch.Tensor  # positions start..end-1 are entered in this pass
    scheduled: torch.Tensor  # hidden states from here on came with this step
    end: torch.Tensor  # then max(k - 1, 0) masked slots
    newest: torch.Tensor  # the token at `end`
    begin: torch.Tensor  # first token of the pass
    entry: torch.Tensor  # as `begin`, masked slots not counted


def requests(
    index: torch.Tensor,
    slot: torch.Tensor,
    start: torch.Tensor,
    scheduled: torch.Tensor,
    end: torch.Tensor,
    k: torch.Tensor,
    newest: torch.Tensor,
) -> tuple[Requests, int, int]:
    """`(requests, tokens of the pass, entered ones among them)`."""
    entered = end - start
    lengths = entered + (k - 1).clamp(min=0)
    begin, entry = lengths.cumsum(0) - lengths, entered.cumsum(0) - entered
    found = Requests(index, slot, start, scheduled, end, newest, begin, entry)
    return found, int(lengths.sum()), int(entered.sum())


def owners(found: Requests, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each of `count` tokens: its request, its position, whether it is a masked slot."""
    token = torch.arange(count, device=found.begin.device)
    owner = torch.searchsorted(found.begin, token, right=True) - 1
    position = found.start[owner] + token - found.begin[owner]
    return owner, position, position >= found.end[owner]


def enter(
    found: Requests,
    count: int,
    *,
    tokens: torch.Tensor,  # [batch, longest] int32, without `newest`
    tables: torch.Tensor,  # [batch, blocks] int32
    starts: torch.Tensor,  # [batch + 1] int32, first row of each request in the step
    states: Sequence[torch.Tensor],  # taps of [rows of the step, hidden]
    store: torch.Tensor,  # [slots * window, taps * hidden], a ring for each slot
    block_size: int,
    window: int,
    mask_token: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids int32 `[count]`, positions and KV cache slots int64 `[count]`, and the target's hidden
    states of the entered tokens `[entered, taps * hidden]`."""
    owner, position, masked = owners(found, count)
    index = found.index[owner]
    ids = tokens[index, (position + 1).clamp(max=tokens.shape[1] - 1)]
    ids = torch.where(position == found.end[owner] - 1, found.newest[owner].int(), ids)
    ids = ids.masked_fill(masked, mask_token)
    slots = tables[index, position // block_size].long() * block_size + position % block_size
    owner, where, index = owner[~masked], position[~masked], index[~masked]
    held = where < found.scheduled[owner]
    row = (starts[index] + where - found.scheduled[owner]).masked_fill(held, 0)
    kept = (found.slot[owner] * window + where % window).masked_fill(~held, 0)
    fresh = torch.cat([state[row] for state in states], dim=-1)
    return ids, position, slots, torch.where(held[:, None], store[kept], fresh)


def spread(
    found: Requests, combined: torch.Tensor, shared: torch.Tensor, count: int
) -> torch.Tensor:
    """`[count, hidden]`: the rows of `combined` `[entered, hidden]` where tokens are entered,
    `shared` `[hidden]` in masked slots."""
    _, _, masked = owners(found, count)
    out = shared.expand(count, -1).clone()
    out[~masked] = combined
    return out


def likeliest(
    hidden: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[rows, hidden]`, `[draft vocabulary, hidden]` -> token ids of the target int64 `[rows]`
    and their probabilities float32 `[rows]`.

    Of equal logits the lowest id wins; NaN counts as +inf. A row whose largest logit is not
    finite has a probability of NaN.
    """
    logits = hidden.float() @ weight.float().T
    best = logits.nan_to_num(torch.inf, torch.inf, -torch.inf).argmax(-1)
    probability = logits.softmax(-1).gather(1, best[:, None])[:, 0]
    return (best if offsets is None else best + offsets[best]), probability
