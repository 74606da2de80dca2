"""Replay lossless speculation over text that the target has written.

Verification accepts a draft exactly as far as it agrees with the target's own text, also where
that is sampled with noise of each position (position_noise.py). What a head drafts at an anchor
depends only on the text before it and on that noise. So the drafts of all anchors are made
together, and the replay for each K only looks up how far they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch

from drafters.model.head import DraftHead
from drafters.model.selector import SelectorTables
from drafters.train.optimisation.draft_passes import (
    Chooser,
    draft_outputs,
    most_probable,
    real_entries,
)

# Slots of a pass. Each computes its masked attention to all others too, so that passes of few are
# faster; mask and logits take most of the memory.
_SLOTS = 512


@torch.no_grad()
def draft_everywhere(
    head: DraftHead,
    taps: torch.Tensor,  # [1, last + 1, taps * hidden]: the target's states that the head reads
    tokens: torch.Tensor,  # [n]
    first: int,
    last: int,
    count: int,
    choose: Chooser = most_probable,
    tables: SelectorTables | None = None,
) -> torch.Tensor:
    """Draft `count` tokens from each anchor `first..last`: target ids [anchors, count].

    Row a - first follows the entry at a, which holds token a + 1, so it predicts the tokens from
    a + 2 on. `tokens` must reach to last + 1 at least. `tables` are those of the head's path
    selector, for a head that has one.
    """
    entries = real_entries(head, tokens[None, : last + 2].to(taps.device), taps)
    drafted = []
    for anchors in torch.arange(first, last + 1, device=taps.device).split(max(_SLOTS // count, 1)):
        later = draft_outputs(head, entries, [anchors] * (count - 1), choose=choose)
        outputs = torch.cat([entries.output[:, anchors], *later])  # [count, anchors, hidden]
        places = anchors + 2 + torch.arange(count, device=anchors.device)[:, None]
        if tables is None:
            chosen = choose(head.logits(outputs), places).T
        else:
            chosen = _walk(head, tables, outputs.transpose(0, 1), places, choose)
        drafted.append(head.to_target(chosen))
    return torch.cat(drafted).to(tokens.device)


def _walk(
    head: DraftHead,
    tables: SelectorTables,
    outputs: torch.Tensor,  # [anchors, count, hidden]
    places: torch.Tensor,  # [count, anchors]
    choose: Chooser,
) -> torch.Tensor:
    """Draft ids `[anchors, count]` along the path that a head's selector chooses. What `choose`
    is given of the second and later ones are the scores of their candidates, -inf elsewhere."""
    selector = head.selector
    assert selector is not None
    logits = head.logits(outputs)
    first = choose(logits[:, 0], places[0])

    def pick(scores: torch.Tensor, candidates: torch.Tensor, position: int) -> torch.Tensor:
        wide = selector.over_vocabulary(scores, candidates, logits.shape[-1])
        return choose(wide, places[position + 1])

    later = selector.walk(tables, outputs[:, 1:], logits[:, 1:], first, pick)
    return torch.cat([first[:, None], later], dim=1)


def agreement(
    drafted: torch.Tensor,  # [anchors, count]
    tokens: torch.Tensor,  # [n]: at least `count` tokens behind the last anchor's entry
    first: int,
) -> list[int]:
    """How many draft tokens of each anchor agree with the text, before the first that does not."""
    anchors, count = drafted.shape
    text = tokens[first + 2 :].unfold(0, count, 1)[:anchors]
    return (drafted == text).int().cumprod(1).sum(1).tolist()


def walk(agreeing: Sequence[int], count: int) -> list[int]:
    """How many draft tokens each step of a request accepts at K = `count`.

    `agreeing[i]` belongs to the step whose newest token is the response's token i. The first token
    comes from the prefill, and after the last one there is no step.
    """
    taken, newest = list[int](), 0
    while newest < len(agreeing):
        taken.append(min(agreeing[newest], count))
        newest += taken[-1] + 1
    return taken


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Steps of some requests at one K, and what they accepted."""

    steps: torch.Tensor  # int64 [requests]
    accepted: torch.Tensor  # int64 [requests, K]: steps that accepted each draft position

    @classmethod
    def of(cls, walks: Sequence[Sequence[int]], count: int) -> Self:
        """Count the steps of `walk`, given for each request."""
        steps = torch.tensor([len(taken) for taken in walks])
        accepted = torch.zeros(len(walks), count, dtype=torch.int64)
        for request, taken in enumerate(walks):
            reached = torch.tensor(taken)[:, None] > torch.arange(count)
            accepted[request] = reached.sum(0)
        return cls(steps, accepted)

    @property
    def length(self) -> float:
        """Tokens per target step, the bonus token included."""
        return 1.0 + float(self.accepted.sum() / self.steps.sum())

    @property
    def per_position(self) -> list[float]:
        """Share of all steps that accepted each position (unconditional)."""
        return (self.accepted.sum(0) / self.steps.sum()).tolist()

    @property
    def conditional(self) -> list[float | None]:
        """Share of steps that accepted each position, of those that accepted the one before; None
        where there are none."""
        hits = [int(self.steps.sum()), *self.accepted.sum(0).tolist()]
        return [here / before if before else None for before, here in pairwise(hits)]
