"""Which elements may see which (paper, section 3.2).

Serving drafts from one anchor at a time with plain causality. Training lays many drafts into
one pass, and the mask makes each of them see exactly what it would see when served.
"""

from __future__ import annotations

import torch

from drafters.train.slots import Slots


def attention_mask(slots: Slots) -> torch.Tensor:
    """Bool [elements, elements]: row sees column.

    Real context up to the anchor, the anchor's own earlier slots, and itself.
    """
    anchor, depth = slots.anchors, slots.depths
    real = (depth[None] == 0) & (anchor[None] <= anchor[:, None])
    chain = (anchor[None] == anchor[:, None]) & (depth[None] <= depth[:, None])
    return real | chain
