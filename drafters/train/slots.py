"""The entries of one head pass: real context and the parallel slots of many anchors.

An element is a pair (anchor, depth). Depth 0 is the real entry at `anchor`; depth d >= 1 is
the d-th parallel slot of a draft that starts there. It sits at position anchor + d and
predicts the token at anchor + d + 2 (the entry at p already holds token p + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Slots:
    """Elements in order: all real entries, then the slots of depth 1, 2, ..."""

    anchors: torch.Tensor  # [elements]
    depths: torch.Tensor  # [elements]
    context: int  # number of real entries, which come first

    @property
    def positions(self) -> torch.Tensor:
        return self.anchors + self.depths

    @property
    def predicted(self) -> torch.Tensor:
        """Index of the token that each element predicts: [elements]."""
        return self.anchors + self.depths + 2


def lay_out(context: int, chains: Sequence[torch.Tensor]) -> Slots:
    """Elements for `context` real entries and, per depth 1.., the anchors that go that deep."""
    anchors = [torch.arange(context), *chains]
    depths = [torch.full_like(part, depth) for depth, part in enumerate(anchors)]
    return Slots(torch.cat(anchors), torch.cat(depths), context)


def head_inputs(
    slots: Slots,
    tokens: torch.Tensor,  # [batch, context + 1]: the text
    fused: torch.Tensor,  # [batch, context, hidden]: fused taps of the text
    mask_hidden: torch.Tensor,  # [1, hidden]: fused `mask_hidden`
    mask_token: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, hidden states and positions of all elements, batch first."""
    batch, parallel = len(tokens), len(slots.anchors) - slots.context
    ids = torch.cat(
        [tokens[:, 1 : slots.context + 1], tokens.new_full((batch, parallel), mask_token)], dim=1
    )
    hidden = torch.cat([fused, mask_hidden.expand(batch, parallel, -1)], dim=1)
    return ids, hidden, slots.positions.expand(batch, -1)
