"""Run a head over whole texts: the real entries once, then the drafts of all anchors.

Serving drafts from one anchor at a time. Here the drafts of all anchors share one pass. The real
entries run first, with a causal mask, and leave their keys and values. Then each draft attends to
the real entries up to its anchor and to its anchor's earlier slots, exactly as in serving (P-EAGLE
paper, section 3.2; EAGLE-3, section 3.2).

Drafts of different anchors never attend to each other, so any set of anchors can run by itself:
the sequence partitioning of the P-EAGLE paper (section 3.3: depth >= 2 stays with its chain).
Since the real entries are not cut, gradients do not depend on the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from drafters.model.head import DraftHead
from drafters.train.optimisation.buckets import bucket

# Draft ids [..., n] from logits [..., n, draft vocabulary] of the tokens at places [..., n].
Chooser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def most_probable(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The Chooser of greedy drafts."""
    return logits.argmax(-1)


@dataclass(slots=True)
class Entries:
    """Real entries after a pass. Implements `Store`: the pass itself fills keys and values."""

    keys: list[torch.Tensor]  # per layer [rows, key heads, n, head size]
    values: list[torch.Tensor]
    output: torch.Tensor  # [rows, n, hidden]
    carried: torch.Tensor  # [rows, n, hidden]

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values; returns both."""
        self.keys.append(key)
        self.values.append(value)
        return key, value

    def tensors(self) -> list[torch.Tensor]:
        """All tensors in a fixed order."""
        return [self.output, self.carried, *self.keys, *self.values]

    def leaves(self) -> Entries:
        """A copy whose tensors collect gradients for a later backward pass through this one."""
        output, carried, *rest = [item.detach().requires_grad_() for item in self.tensors()]
        return Entries(rest[: len(self.keys)], rest[len(self.keys) :], output, carried)


def real_entries(head: DraftHead, tokens: torch.Tensor, taps: torch.Tensor) -> Entries:
    """Run the real entries of texts `[rows, n + 1]` with taps `[rows, n, taps * hidden]`."""
    rows, n = taps.shape[:2]
    empty = taps.new_empty(0)
    entries = Entries([], [], empty, empty)
    positions = torch.arange(n, device=tokens.device).expand(rows, -1)
    entries.output, entries.carried = head(
        tokens[:, 1 : n + 1], head.fuse(taps), positions, None, entries
    )
    return entries


def draft_outputs(
    head: DraftHead,
    entries: Entries,
    chains: Sequence[torch.Tensor],  # anchors that reach depth 1, 2, ...: ascending, nested
    tokens: torch.Tensor | None = None,  # [rows, n + 1]; None: EAGLE-3 reads its own drafts
    choose: Chooser = most_probable,  # how it makes them
) -> list[torch.Tensor]:
    """Final hidden states of the drafts at depth 1, 2, ...: [rows, anchors, hidden] each.

    The slot of depth d of anchor a is at position a + d and predicts token a + d + 2 (the entry
    at p already holds token p + 1).
    """
    if not chains or not len(chains[0]):
        return []
    if head.config.method == "p-eagle":
        return _in_one_pass(head, entries, chains)
    return _one_by_one(head, entries, chains, tokens, choose)


class _Behind:
    """A store that begins with the real entries before `limit`, and grows by what passes add."""

    def __init__(self, entries: Entries, limit: int) -> None:
        self._keys = [key[:, :, :limit] for key in entries.keys]
        self._values = [value[:, :, :limit] for value in entries.values]

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._keys[layer] = torch.cat([self._keys[layer], key], dim=2)
        self._values[layer] = torch.cat([self._values[layer], value], dim=2)
        return self._keys[layer], self._values[layer]


def _in_one_pass(
    head: DraftHead, entries: Entries, chains: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    rows, limit = len(entries.output), _limit(entries, chains)
    sizes = [len(chain) for chain in chains]
    # Padding has a depth below all others, so that no draft attends to it.
    sizes.append(bucket(sum(sizes)) - sum(sizes))
    anchors = torch.cat([*chains, chains[0][-1:].expand(sizes[-1])])
    depths = torch.arange(1, len(sizes) + 1, device=anchors.device).repeat_interleave(
        torch.tensor(sizes, device=anchors.device)
    )
    own = (anchors[:, None] == anchors) & (depths[:, None] >= depths)
    allowed = torch.cat([_real_before(anchors, limit), own], dim=1)
    output, _ = head(
        anchors.new_full((rows, len(anchors)), head.config.ptd_token_id),
        head.fuse(head.mask_hidden).expand(rows, len(anchors), -1),
        (anchors + depths).expand(rows, -1),
        allowed[None],
        _Behind(entries, limit),
        torch.arange(limit, device=anchors.device),
    )
    return list(output.split(sizes, dim=1)[:-1])


def _one_by_one(
    head: DraftHead,
    entries: Entries,
    chains: Sequence[torch.Tensor],
    tokens: torch.Tensor | None,
    choose: Chooser,
) -> list[torch.Tensor]:
    rows, limit = len(entries.output), _limit(entries, chains)
    store, outputs, seen = _Behind(entries, limit), list[torch.Tensor](), list[torch.Tensor]()
    before = torch.arange(entries.output.shape[1], device=chains[0].device)
    past = before[:limit]  # positions of all that the store holds
    output, carried = entries.output, entries.carried
    for depth, anchors in enumerate(chains, 1):
        count = len(anchors)
        if not count:
            break
        padding = anchors[-1:].expand(bucket(count) - count)
        padded = torch.cat([anchors, padding])
        index = torch.searchsorted(before, padded)
        if tokens is None:
            places = (padded + depth + 1).expand(rows, -1)
            ids = head.to_target(choose(head.logits(output[:, index]), places))
        else:
            ids = tokens[:, padded + depth + 1]
        seen.append(torch.cat([anchors, torch.full_like(padding, -1)]))  # nothing sees anchor -1
        own = padded[:, None] == torch.cat(seen)
        allowed = torch.cat([_real_before(padded, limit), own], dim=1)
        positions = padded + depth
        output, carried = head(
            ids, carried[:, index], positions.expand(rows, -1), allowed[None], store, past
        )
        past = torch.cat([past, positions])
        output, carried = output[:, :count], carried[:, :count]
        outputs.append(output)
        before = anchors
    return outputs


def _limit(entries: Entries, chains: Sequence[torch.Tensor]) -> int:
    """How many real entries drafts of these chains can see: up to the last anchor, rounded up."""
    return min(bucket(int(chains[0][-1]) + 1), entries.output.shape[1])


def _real_before(anchors: torch.Tensor, limit: int) -> torch.Tensor:
    """Which real entries each anchor's drafts see, those up to and including it: bool [anchors,
    limit]."""
    return torch.arange(limit, device=anchors.device) <= anchors[:, None]
