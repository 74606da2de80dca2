"""One drafting step with a KV cache: the reference for what the engine does in each step."""

from __future__ import annotations

import torch

from drafters.model.cache import KeyValueCache
from drafters.model.head import DraftHead


@torch.no_grad()
def draft(
    head: DraftHead,
    cache: KeyValueCache,  # one sequence's real entries so far
    tokens: torch.Tensor,  # [n]: tokens at p + 1 for the n new entries p
    taps: torch.Tensor,  # [n, taps * target hidden]: the target's hidden states at p
    count: int,
) -> torch.Tensor:
    """Add n real entries to the cache and draft `count` tokens after the last one, greedily:
    `[count]` ids of the target's vocabulary. Raises ValueError if either number is 0."""
    if len(tokens) < 1 or count < 1:
        raise ValueError("a draft needs at least one new entry and one token to draft")
    step = _in_one_pass if head.config.method == "p-eagle" else _one_by_one
    past = cache.length
    drafted = step(head, cache, tokens, head.fuse(taps), count)
    cache.truncate(past + len(tokens))  # drafts are not text before the target accepts them
    return head.to_target(drafted)


def _in_one_pass(
    head: DraftHead, cache: KeyValueCache, tokens: torch.Tensor, hidden: torch.Tensor, count: int
) -> torch.Tensor:
    """P-EAGLE: masked positions, of mask token and `mask_hidden`, follow the last real entry."""
    slots = count - 1
    ids = torch.cat([tokens, tokens.new_full((slots,), head.config.ptd_token_id)])
    hidden = torch.cat([hidden, head.fuse(head.mask_hidden).expand(slots, -1)])
    output, _ = _causal_pass(head, cache, ids, hidden)
    return head.logits(output[len(tokens) - 1 :]).argmax(-1)


def _one_by_one(
    head: DraftHead, cache: KeyValueCache, tokens: torch.Tensor, hidden: torch.Tensor, count: int
) -> torch.Tensor:
    """EAGLE-3: each draft and the state behind it are the next pass's input."""
    drafted: list[torch.Tensor] = []
    for _ in range(count):
        output, carried = _causal_pass(head, cache, tokens, hidden)
        drafted.append(head.logits(output[-1:]).argmax(-1))
        tokens, hidden = head.to_target(drafted[-1]), carried[-1:]
    return torch.cat(drafted)


def _causal_pass(
    head: DraftHead, cache: KeyValueCache, ids: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    past, n = cache.length, len(ids)
    positions = torch.arange(past + n, device=ids.device)
    allowed = torch.ones(n, past + n, dtype=torch.bool, device=ids.device).tril(past)
    output, carried = head(
        ids[None], hidden[None], positions[None, past:], allowed[None], cache, positions[:past]
    )
    return output[0], carried[0]
