"""One training step of a head: the gradients of a batch, for both methods and any partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from drafters.train.optimisation.draft_passes import Entries, draft_outputs, real_entries
from drafters.train.optimisation.loss import IGNORED, DraftLoss


@dataclass(frozen=True, slots=True)
class Batch:
    """The texts of a step, padded on the right, and the target's hidden states over them."""

    tokens: torch.Tensor  # [rows, n + 1]
    prompts: torch.Tensor  # [rows]: tokens of the prompt
    ends: torch.Tensor  # [rows]: valid tokens, the prompt's included
    taps: torch.Tensor  # [rows, n, taps * hidden]
    final: torch.Tensor | None  # [rows, n, hidden]; None if the loss does not need it

    @property
    def context(self) -> int:
        """Number n of real entries: the last token is only predicted."""
        return self.tokens.shape[1] - 1

    def labels(self, predicted: torch.Tensor) -> torch.Tensor:
        """Labels [rows, elements]: tokens at the indices `predicted` [elements], or IGNORED where
        serving never drafts.

        That is in the prompt and at the first token behind it, which the target writes before
        anything is drafted.
        """
        tokens = self.tokens[:, predicted.clamp(max=self.context)]
        inside = (predicted > self.prompts[:, None]) & (predicted < self.ends[:, None])
        return tokens.masked_fill(~inside, IGNORED)


@dataclass(frozen=True, slots=True)
class DepthLosses:
    """Sums of losses and numbers of drafts, by depth: [K]."""

    sums: torch.Tensor
    counts: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean loss of each depth."""
        return self.sums / self.counts.clamp(min=1)


def segments(chains: Sequence[torch.Tensor], count: int, n: int) -> Iterator[list[torch.Tensor]]:
    """Split `chains` into those of `count` equal ranges of the anchors `0..n-1`, without empty
    ones.

    All slots of an anchor stay in the range of the anchor (P-EAGLE paper, section 3.3).
    """
    bounds = [n * index // count for index in range(count + 1)]
    for low, high in pairwise(bounds):
        part = [chain[(chain >= low) & (chain < high)] for chain in chains]
        if part and len(part[0]):
            yield [chain for chain in part if len(chain)]


def accumulate_gradients(
    loss: DraftLoss,
    batch: Batch,
    chains: Sequence[torch.Tensor],  # anchors that reach depth 1, 2, ...: ascending, nested
    partitions: int = 1,
) -> DepthLosses:
    """Add the gradient of the batch's mean loss to the head's parameters.

    Every draft counts the same: COD already weighs deep slots less by dropping some (paper,
    section 3.1). With more partitions the drafts of fewer anchors exist at a time, so that
    attention and activations of drafts take less memory by that factor; gradients stay the same.
    """
    device = batch.tokens.device
    places = [torch.arange(batch.context, device=device), *chains]
    labels = [
        loss.wanted(batch.labels(anchors + depth + 2)) for depth, anchors in enumerate(places)
    ]
    counts = torch.stack([(item >= 0).sum() for item in labels])
    scale = 1.0 / max(int(counts.sum()), 1)
    sums = torch.zeros(len(places), device=device)
    entries = real_entries(loss.head, batch.tokens, batch.taps)
    leaves = entries.leaves()
    _backward(loss, batch, [leaves.output], [labels[0]], [places[0]], 0, scale, sums)
    for part in segments(chains, partitions, batch.context):
        outputs = draft_outputs(loss.head, leaves, part, batch.tokens)
        wanted = [
            item[:, torch.searchsorted(chain, anchors)]
            for item, chain, anchors in zip(labels[1:], chains, part, strict=False)
        ]
        _backward(loss, batch, outputs, wanted, part, 1, scale, sums)
    _through(entries, leaves)
    return DepthLosses(sums, counts)


def _backward(
    loss: DraftLoss,
    batch: Batch,
    outputs: Sequence[torch.Tensor],  # per depth [rows, anchors, hidden]
    labels: Sequence[torch.Tensor],  # per depth [rows, anchors]
    anchors: Sequence[torch.Tensor],  # per depth [anchors]
    first: int,  # depth of the first of them
    scale: float,
    sums: torch.Tensor,
) -> None:
    """Backward pass of some outputs; adds their losses to `sums`."""
    masks = [item >= 0 for item in labels]
    rows = torch.cat([output[mask] for output, mask in zip(outputs, masks, strict=True)])
    if not len(rows):
        return
    final = None
    if batch.final is not None:
        # The target's distribution of token t comes from its state at token t - 1.
        behind = [where + first + index + 1 for index, where in enumerate(anchors)]
        states = [batch.final[:, where.clamp(max=batch.context - 1)] for where in behind]
        final = torch.cat([item[mask] for item, mask in zip(states, masks, strict=True)])
    wanted = torch.cat([item[mask] for item, mask in zip(labels, masks, strict=True)])
    leaf = rows.detach().requires_grad_()
    losses = loss.backward(leaf, wanted, final, scale)
    rows.backward(leaf.grad)
    for index, part in enumerate(losses.split([int(mask.sum()) for mask in masks])):
        sums[first + index] += part.sum()


def _through(entries: Entries, leaves: Entries) -> None:
    """Backward pass of the real entries, with the gradients that drafts left on `leaves`."""
    pairs = zip(entries.tensors(), leaves.tensors(), strict=True)
    asked = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
    if asked:
        tensors, gradients = zip(*asked, strict=True)
        torch.autograd.backward(tensors, gradients)
