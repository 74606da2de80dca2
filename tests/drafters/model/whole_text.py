"""One draft by passes over the whole text: the reference for training and for the engine."""

from __future__ import annotations

import torch

from drafters.model.head import DraftHead


@torch.no_grad()
def draft(
    head: DraftHead,
    tokens: torch.Tensor,  # [n]: tokens at p + 1 for the entries p of the text, n > 0
    taps: torch.Tensor,  # [n, taps * target hidden]: the target's hidden states at p
    count: int,
) -> torch.Tensor:
    """`count` greedy drafts behind the last entry: `[count]` ids of the target's vocabulary."""
    hidden = head.fuse(taps)
    if head.config.method == "p-eagle":  # masked slots follow the entries, all in one pass
        slots = count - 1
        ids = torch.cat([tokens, tokens.new_full((slots,), head.config.ptd_token_id)])
        hidden = torch.cat([hidden, head.fuse(head.mask_hidden).expand(slots, -1)])
        output, _ = _causal_pass(head, ids, hidden)
        states = output[len(tokens) - 1 :]
        logits = head.logits(states)
        if head.selector is None:
            return head.to_target(logits.argmax(-1))
        chosen = [logits[0].argmax()]
        for state, row in zip(states[1:], logits[1:], strict=True):
            candidates = row.topk(head.selector.config.candidates).indices
            added = head.selector.corrections(head.selector_tables(), state, chosen[-1], candidates)
            chosen.append(candidates[(row[candidates] + added).argmax()])
        return head.to_target(torch.stack(chosen))
    drafted: list[torch.Tensor] = []
    for _ in range(count):  # EAGLE-3: each draft and the state behind it are the next entry
        output, carried = _causal_pass(head, tokens, hidden)
        drafted.append(head.to_target(head.logits(output[-1:]).argmax(-1)))
        tokens = torch.cat([tokens, drafted[-1]])
        hidden = torch.cat([hidden, carried[-1:]])
    return torch.cat(drafted)


def _causal_pass(
    head: DraftHead, ids: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    output, carried = head(ids[None], hidden[None], torch.arange(len(ids))[None], None)
    return output[0], carried[0]
