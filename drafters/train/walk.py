"""The walk of lossless greedy speculation over text that the target has written.

Greedy verification accepts a draft exactly as far as it agrees with the target's own text.
Parallel slots never see each other's tokens, so what a head drafts at an anchor depends on
the text before it alone: one pass drafts at every anchor, and the walk only looks up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafters.model.llama import Llama
from drafters.model.peagle import PEagleHead
from drafters.train.mask import attention_mask
from drafters.train.slots import head_inputs, lay_out


@torch.no_grad()
def draft_everywhere(
    head: PEagleHead,
    target: Llama,
    tokens: torch.Tensor,  # [n]
    first: int,
    last: int,
    count: int,
) -> torch.Tensor:
    """Drafts of `count` tokens from each anchor `first..last`: [anchors, count]."""
    context = last + 1
    anchors = torch.arange(first, context)
    slots = lay_out(context, [anchors] * (count - 1))
    taps = head.config.eagle_aux_hidden_state_layer_ids
    causal = torch.ones(1, context, context, dtype=torch.bool).tril()
    _, states = target(tokens[None, :context], torch.arange(context)[None], causal, taps)
    assert states is not None
    inputs = head_inputs(
        slots,
        tokens[None],
        head.fuse(states),
        head.fuse(head.mask_hidden),
        head.config.ptd_token_id,
    )
    output = head(*inputs, attention_mask(slots)[None])[0]
    drafted = target.logits(output[first:]).argmax(-1)  # all of depth 0, then of depth 1, ...
    return drafted.view(count, len(anchors)).T


@dataclass(slots=True)
class Acceptance:
    """Counts of a walk; `accepted[i]` is how often draft position i was accepted."""

    steps: int
    accepted: list[int]

    @classmethod
    def nothing(cls, count: int) -> Acceptance:
        return cls(0, [0] * count)

    def add(self, taken: int) -> None:
        self.steps += 1
        for position in range(taken):
            self.accepted[position] += 1

    @property
    def length(self) -> float:
        """Tokens per target step, the bonus token included."""
        return 1.0 + sum(self.accepted) / max(self.steps, 1)

    @property
    def per_position(self) -> list[float]:
        """Share of all steps that accepted each position (unconditional)."""
        return [hits / max(self.steps, 1) for hits in self.accepted]


def walk(
    drafted: torch.Tensor,  # [anchors, at least count], the first row at anchor `first`
    tokens: torch.Tensor,  # [n]: the target's text, `count` tokens or more beyond `end`
    first: int,
    end: int,  # the request is over once the token at end - 1 is out
    count: int,
    result: Acceptance,
) -> None:
    """Speculate from the first generated token to the end, adding each step to `result`."""
    newest = first + 1  # index of the newest token; its anchor is the entry before it
    while newest < end - 1:
        row = drafted[newest - 1 - first, :count]
        agrees = (row == tokens[newest + 1 : newest + 1 + count]).int()
        taken = int(agrees.cumprod(0).sum())
        result.add(taken)
        newest += taken + 1
