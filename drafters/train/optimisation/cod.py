"""Conditional drop (COD): train deep draft positions at fewer anchors (P-EAGLE, section 3.1).

With K slots for each of n anchors a pass would hold n * K elements. COD keeps n * r^d of
depth d: 4.2 n at r = 0.8 and K = 8. Shallow slots, which decide whether deep ones count, get most
of the training.
"""

from __future__ import annotations

import torch

RETAIN = 0.8
K_TRAIN = 8


def sample_chains(
    first: int,
    last: int,
    generator: torch.Generator,
    *,
    k_train: int = K_TRAIN,
    retain: float = RETAIN,
) -> list[torch.Tensor]:
    """Sample the anchors of each depth 1..k_train-1 from `first..last`; each sorted, int64.

    `last` is the last anchor whose depth-0 prediction lies within the text; depth d ends d
    anchors earlier. The sets are nested, because a slot needs all earlier slots of its anchor.
    """
    count = max(last - first + 1, 0)
    kept = torch.arange(first, first + count)
    chains: list[torch.Tensor] = []
    for depth in range(1, k_train):
        inside = kept[kept <= last - depth]
        size = min(len(inside), round(count * retain**depth))
        order = torch.randperm(len(inside), generator=generator)[:size]
        kept = inside[order].sort().values
        chains.append(kept)
    return chains
