"""Losses over chunks of tokens, so that the logits of all tokens never exist at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from drafters.model.head import DraftHead
from drafters.train.optimisation.buckets import bucket
from drafters.train.target import capped

Kind = Literal["labels", "distribution"]
IGNORED = -100
_CHUNK_LOGITS = 2**24  # of a chunk of tokens: 64 MiB in fp32
# Each chunk reads the whole output matrix: many of few rows would be slow.
_LEAST_ROWS, _MOST_ROWS = 256, 2048


def chunk_rows(vocabulary: int) -> int:
    """How many rows of logits exist at a time: a power of two, 2,048 of 8,192 tokens, fewer of a
    larger vocabulary."""
    rows = 1 << (_CHUNK_LOGITS // vocabulary).bit_length() - 1
    return min(max(rows, _LEAST_ROWS), _MOST_ROWS)


def cross_entropy_backward(
    hidden: torch.Tensor,  # [tokens, hidden]
    weight: nn.Parameter,  # [vocabulary, hidden]
    labels: torch.Tensor,  # [tokens]
) -> torch.Tensor:
    """Mean cross-entropy; its backward pass has run, for `weight` and all that made `hidden`."""
    leaf = hidden.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float32)
    chunk = chunk_rows(len(weight))
    for start in range(0, len(labels), chunk):
        part = slice(start, start + chunk)
        logits = functional.linear(leaf[part], weight).float()
        loss = functional.cross_entropy(logits, labels[part], reduction="sum") / len(labels)
        loss.backward()
        total += loss.detach()
    assert leaf.grad is not None
    hidden.backward(leaf.grad)
    return total


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """Cross-entropy of a head's drafts against the text, or against the target's distribution.

    `labels` compares with the token that the text has, `distribution` with the target's
    probabilities there, which tell more per token (EAGLE-3 and the speculators library use them).
    With a draft vocabulary, labels outside it are ignored and distributions renormalised.
    """

    head: DraftHead
    lm_head: torch.Tensor  # [vocabulary, hidden]: the target's
    kind: Kind
    softcap: float | None = None  # of the target's logits

    def wanted(self, labels: torch.Tensor) -> torch.Tensor:
        """Draft ids of target ids, any shape; IGNORED for those outside the draft vocabulary."""
        if not self.head.config.draft_vocab_size:
            return labels
        draft_ids = self.head.t2d.long().cumsum(0) - 1
        known = self.head.t2d[labels.clamp(min=0)] & (labels >= 0)
        return torch.where(known, draft_ids[labels.clamp(min=0)], IGNORED)

    def backward(
        self,
        output: torch.Tensor,  # [elements, hidden]: the head's, a leaf of the graph
        labels: torch.Tensor,  # [elements]: draft ids, none IGNORED
        final: torch.Tensor | None,  # [elements, hidden]: the target's states before the labels
        scale: float,
    ) -> torch.Tensor:
        """Add `scale` times the summed loss's gradient to `output`; returns losses [elements]."""
        losses = torch.empty(len(labels), device=output.device)
        matrix = None if self.kind == "labels" else self._target_matrix()
        chunk = chunk_rows(self.head.config.draft_vocab_size or self.head.config.vocab_size)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            count = len(labels[part])
            rows = functional.pad(output[part], (0, 0, 0, bucket(count) - count))
            logits = self.head.logits(rows)[:count].float()
            if matrix is None:
                found = functional.cross_entropy(logits, labels[part], reduction="none")
            else:
                assert final is not None
                found = functional.cross_entropy(
                    logits, self._probabilities(final[part], matrix), reduction="none"
                )
            (found.sum() * scale).backward()
            losses[part] = found.detach()
        return losses

    def _target_matrix(self) -> torch.Tensor:
        """The rows of the target's output matrix for the draft vocabulary."""
        matrix = self.lm_head[: self.head.config.vocab_size]
        return matrix[self.head.t2d] if self.head.config.draft_vocab_size else matrix

    @torch.no_grad()
    def _probabilities(self, final: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """The target's probabilities, over the draft vocabulary: [elements, draft vocabulary]."""
        return capped(functional.linear(final, matrix).float(), self.softcap).softmax(-1)
