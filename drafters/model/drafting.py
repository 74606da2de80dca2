"""One drafting step with a cache: the reference for what an engine does per step."""

from __future__ import annotations

import torch
from torch.nn import functional

from drafters.model.cache import KeyValueCache
from drafters.model.peagle import PEagleHead


@torch.no_grad()
def draft(
    head: PEagleHead,
    lm_head: torch.Tensor,  # [vocabulary, hidden]: the target's output matrix
    cache: KeyValueCache,  # one sequence's real entries so far
    tokens: torch.Tensor,  # [n]: tokens at p + 1 for the n new entries p
    taps: torch.Tensor,  # [n, taps * target hidden]: the target's hidden states at p
    count: int,
) -> torch.Tensor:
    """Add n real entries to the cache and draft `count` tokens after the last one: `[count]`."""
    new, slots, past = len(tokens), count - 1, cache.length
    if new < 1 or count < 1:
        raise ValueError("a draft needs at least one new entry and one token to draft")
    ids = torch.cat([tokens, tokens.new_full((slots,), head.config.ptd_token_id)])
    hidden = torch.cat([head.fuse(taps), head.fuse(head.mask_hidden).expand(slots, -1)])
    positions = torch.arange(past, past + new + slots)
    # Plain causality: the slots of the previous step left the cache, so all before is real.
    allowed = torch.ones(new + slots, past + new + slots, dtype=torch.bool).tril(past)
    output = head(ids[None], hidden[None], positions[None], allowed[None], cache)
    cache.truncate(past + new)
    return functional.linear(output[0, new - 1 :], lm_head).argmax(-1)
