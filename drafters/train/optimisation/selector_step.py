"""One training step of a path selector: its gradients over a batch, with the head frozen.

A place is a draft token behind an anchor's first one. There the selector has to choose among the
candidates as the target does, given the true token before. In serving the token before is the
selector's own choice, but where that is not the true one, verification has ended the draft already
and no later choice counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn import functional

from drafters.model.head import DraftHead
from drafters.model.selector import top_candidates
from drafters.train.optimisation.buckets import bucket
from drafters.train.optimisation.draft_passes import draft_outputs, real_entries
from drafters.train.optimisation.loss import DraftLoss
from drafters.train.optimisation.step import Batch, DepthLosses, segments
from drafters.train.target import capped


@dataclass(frozen=True, slots=True)
class Places:
    """What a selector reads and should choose at some places."""

    states: torch.Tensor  # [places, hidden]: of the head
    before: torch.Tensor  # [places]: draft ids of the true tokens before
    logits: torch.Tensor  # [places, candidates]
    candidates: torch.Tensor  # [places, candidates]: draft ids
    wanted: torch.Tensor  # [places, candidates]: probabilities, float32
    depths: torch.Tensor  # [places]: 1 for the second draft token


def accumulate_selector_gradients(
    loss: DraftLoss,
    batch: Batch,
    chains: Sequence[torch.Tensor],  # anchors that reach depth 1, 2, ...: ascending, nested
    partitions: int = 1,
) -> DepthLosses:
    """Add the gradient of the mean loss of all places to the selector's parameters.

    Depth 0 of the result counts the anchors; it has no loss, as no selector chooses there.
    """
    anchors = torch.arange(batch.context, device=batch.tokens.device)
    counts = torch.zeros(len(chains) + 1, dtype=torch.int64)
    counts[0] = (batch.labels(anchors + 2) >= 0).sum()
    sums = torch.zeros(len(counts))
    places = _places(loss, batch, chains, partitions)
    if places is None:
        return DepthLosses(sums, counts)
    losses = _losses(loss.head, places)
    losses.mean().backward()
    depths = places.depths.cpu()
    sums.index_add_(0, depths, losses.detach().cpu())
    counts.index_add_(0, depths, torch.ones_like(depths))
    return DepthLosses(sums, counts)


def _losses(head: DraftHead, places: Places) -> torch.Tensor:
    """The cross-entropy of what is wanted among the candidates: float32 [places]."""
    selector = head.selector
    assert selector is not None
    # Of a large vocabulary a batch has few tokens: only they need rows of the tables.
    drafts, rows = torch.cat([places.before[:, None], places.candidates], dim=1).unique(
        return_inverse=True
    )
    tables = head.selector_tables(functional.pad(drafts, (0, bucket(len(drafts)) - len(drafts))))
    added = selector.corrections(tables, places.states, rows[:, 0], rows[:, 1:])
    return functional.cross_entropy(places.logits.float() + added, places.wanted, reduction="none")


@torch.no_grad()
def _places(
    loss: DraftLoss, batch: Batch, chains: Sequence[torch.Tensor], partitions: int
) -> Places | None:
    """All places of a batch; None if there is none."""
    entries = real_entries(loss.head, batch.tokens, batch.taps)
    found: list[Places] = []
    for part in segments(chains, partitions, batch.context):
        outputs = draft_outputs(loss.head, entries, part, batch.tokens)
        for depth, (output, anchors) in enumerate(zip(outputs, part, strict=True), 1):
            before, true = (loss.wanted(batch.labels(anchors + depth + ahead)) for ahead in (1, 2))
            known = (before >= 0) & (true >= 0)
            final = None
            if batch.final is not None:
                behind = (anchors + depth + 1).clamp(max=batch.context - 1)
                final = batch.final[:, behind][known]
            found.append(_of_depth(loss, depth, output[known], before[known], true[known], final))
    joined = [torch.cat(items) for items in zip(*map(_tensors, found), strict=True)]
    return Places(*joined) if joined and len(joined[0]) else None


def _of_depth(
    loss: DraftLoss,
    depth: int,
    states: torch.Tensor,  # [n, hidden]
    before: torch.Tensor,  # [n]: draft ids
    true: torch.Tensor,  # [n]: draft ids
    final: torch.Tensor | None,  # [n, hidden]: the target's states before the true tokens
) -> Places:
    """The places among n draft tokens, of which the true token is wanted, or what the target gives
    to the candidates."""
    head, count = loss.head, len(states)
    assert head.config.path_selector is not None
    padded = functional.pad(states, (0, 0, 0, bucket(count) - count))
    logits, candidates = top_candidates(
        head.logits(padded)[:count], head.config.path_selector.candidates
    )
    if final is None:
        wanted = (candidates == true[:, None]).float()
    else:
        rows = loss.lm_head[head.to_target(candidates)]
        logits_of_target = (rows @ final[..., None])[..., 0].float()
        wanted = capped(logits_of_target, loss.softcap).softmax(-1)
    kept = wanted.any(1)
    depths = torch.full_like(true, depth)
    return Places(*(item[kept] for item in (states, before, logits, candidates, wanted, depths)))


def _tensors(places: Places) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(places, field.name) for field in fields(places))
