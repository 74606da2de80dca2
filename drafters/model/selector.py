"""A path selector: it chooses P-EAGLE's draft tokens one after another among each one's candidates.

P-EAGLE decodes each position by itself, without knowing which token the position before got. The
selector goes over a request's positions from left to right, and chooses among the most probable
tokens of each by a score that depends on the token chosen before it. So it mends what one pass
cannot know, without another pass. The first position depends on no draft, and is left as it is.

For position i, the head's state h (what `DraftHead.logits` reads), the token a that position i - 1
got, and a candidate b with the head's logit u(b):

    score(b) = u(b) + < query(h, e(a)), C e(b) >
    query(h, e(a)) = silu(S1 n + A1 e(a) + s1) * (S2 n + A2 e(a) + s2),  n = RMSNorm(h)

e are the target's token embeddings, `*` multiplies element by element. All that depends on a token
alone is a table, made once (`PathSelector.tables`), so that a selector has few parameters at any
vocabulary. The idea is that of DFlash2's path selector, and of LiLiCorr (arXiv 2608.20530; vLLM
pull request 57934).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.layers import RMSNorm

# The chosen draft ids [n] among candidates [n, m] by their scores, float32 [n, m]; the number is
# the position's, counted from 0 among those that the selector chooses for.
Pick = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

_FOLDS = 16  # rows of the matrix into which a CPU folds a row of logits


@dataclass(frozen=True, slots=True)
class SelectorTables:
    """What a selector needs of each token of the draft vocabulary, by draft id."""

    before: torch.Tensor  # [draft vocabulary, width]: of the token chosen before
    candidate: torch.Tensor  # [draft vocabulary, rank]: of a candidate


class PathSelector(nn.Module):
    """The path selector of a head; a new one changes no draft."""

    def __init__(self, selector: SelectorConfig, head: HeadConfig) -> None:
        super().__init__()
        self.config = selector
        width = 2 * selector.rank
        self.norm = RMSNorm(head.hidden_size, head.rms_norm_eps)
        self.state = nn.Linear(head.hidden_size, width)
        self.before = nn.Linear(head.target_hidden_size, width, bias=False)
        self.candidate = nn.Linear(head.target_hidden_size, selector.rank, bias=False)
        self.dropout = nn.Dropout(0.0)  # of queries; a training sets its `p`
        nn.init.zeros_(self.candidate.weight)

    def tables(self, embeddings: torch.Tensor) -> SelectorTables:
        """Tables of the target's embeddings of all draft tokens: `[draft vocabulary, target
        hidden]`, in the selector's dtype."""
        return SelectorTables(self.before(embeddings), self.candidate(embeddings))

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """What a query needs of the head's states `[..., hidden]`: `[..., width]`."""
        return self.state(self.norm(states))

    def query(self, projected: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Queries, float32 `[..., rank]`, from results of `project` and rows of
        `SelectorTables.before`, both `[..., width]`."""
        gate, value = (projected.float() + before.float()).chunk(2, dim=-1)
        return self.dropout(functional.silu(gate) * value)

    def corrections(
        self,
        tables: SelectorTables,
        states: torch.Tensor,  # [..., hidden]
        before: torch.Tensor,  # [...], draft ids of the tokens chosen before
        candidates: torch.Tensor,  # [..., m], draft ids
    ) -> torch.Tensor:
        """What is added to the logits of `candidates`: float32 `[..., m]`."""
        query = self.query(self.project(states), functional.embedding(before, tables.before))
        return _products(functional.embedding(candidates, tables.candidate), query)

    def walk(
        self,
        tables: SelectorTables,
        states: torch.Tensor,  # [n, positions, hidden], of the second draft token and later ones
        logits: torch.Tensor,  # [n, positions, draft vocabulary]
        first: torch.Tensor,  # [n], draft ids of the first draft tokens
        pick: Pick | None = None,
    ) -> torch.Tensor:
        """Choose the draft tokens behind `first`: draft ids `[n, positions]`.

        Each gets the candidate with the largest score, or what `pick` returns. Nothing waits for
        the device.
        """
        top, candidates = top_candidates(logits, self.config.candidates)
        # `embedding` takes a third of the time of an index, for 128 positions of rank 256.
        rows = functional.embedding(candidates.transpose(0, 1), tables.candidate)
        projected = self.project(states)
        chosen, before = list[torch.Tensor](), first
        for position in range(candidates.shape[1]):
            query = self.query(projected[:, position], functional.embedding(before, tables.before))
            scores = top[:, position].float() + _products(rows[position], query)
            before = (pick or best)(scores, candidates[:, position], position)
            chosen.append(before)
        return torch.stack(chosen, dim=1) if chosen else candidates[..., 0]

    @staticmethod
    def over_vocabulary(
        scores: torch.Tensor, candidates: torch.Tensor, vocabulary: int
    ) -> torch.Tensor:
        """Scores of candidates, both `[n, m]`, as logits of a whole draft vocabulary, -inf
        elsewhere: `[n, vocabulary]`."""
        wide = scores.new_full((len(scores), vocabulary), -torch.inf)
        return wide.scatter_(1, candidates, scores)


def top_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of each row, largest first, and their draft ids: both `[..., count]`.

    On a CPU only the columns with the largest maxima are looked at, of a matrix into which a row is
    folded: the others cannot hold one of the largest `count`.
    """
    size = logits.shape[-1]
    if logits.device.type != "cpu" or size % _FOLDS or size < 4 * _FOLDS * count:
        top, ids = logits.topk(count, dim=-1)
        return top, ids
    width = size // _FOLDS
    columns = logits.unflatten(-1, (_FOLDS, width)).amax(-2).topk(count, dim=-1).indices
    ids = (columns[..., None, :] + torch.arange(0, size, width)[:, None]).flatten(-2)
    top, order = logits.gather(-1, ids).topk(count, dim=-1)
    return top, ids.gather(-1, order)


def _products(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Inner products of rows `[..., m, rank]` with a float32 query `[..., rank]`: float32
    `[..., m]`."""
    return (rows.float() @ query[..., None])[..., 0]


def best(scores: torch.Tensor, candidates: torch.Tensor, position: int) -> torch.Tensor:
    """The `Pick` of greedy drafts: the candidate with the largest score."""
    return candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
