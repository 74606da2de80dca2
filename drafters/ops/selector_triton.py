"""The walk of a path selector on a GPU: one program for each request.

A program goes over its request's positions. At each it makes the query from the position's state
and from the token before, and takes the candidate with the largest score. `PathSelector.walk`
(drafters/model/selector.py) is its specification, and has the formula. For each position it reads
candidates + 1 or 2 rows of the tables: 9 KiB at rank 256 and 16 candidates in bfloat16. Where
drafts are drawn, a launch walks over one position, and the draw puts another token in the chosen
one's place before the next. None of it is timed on a GPU yet.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments get types only when it is compiled.
from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 128  # elements of a query that are made together


@triton.jit(do_not_specialize=["positions", "begin", "end"])
def walk_kernel(
    top, candidates, projected, before_table, candidate_table, tokens, scores,
    positions, count, rank, begin, end,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Choose the tokens of positions `begin` to `end` - 1 of a request."""
    request = tl.program_id(0).to(tl.int64)
    tokens += request * (positions + 1)
    slot = tl.arange(0, COUNT)
    width = 2 * rank
    before = tl.load(tokens + begin)
    for position in range(begin, end):
        row = request * positions + position
        ids = tl.load(candidates + row * count + slot, mask=slot < count, other=0)
        total = tl.load(top + row * count + slot, mask=slot < count, other=float("-inf"))
        total = total.to(tl.float32)
        for first in range(0, rank, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < rank
            state = tl.load(projected + row * width + column, mask=inside, other=0.0)
            side = tl.load(before_table + before * width + column, mask=inside, other=0.0)
            query = state.to(tl.float32) + side.to(tl.float32)
            column2 = column + rank
            value = tl.load(projected + row * width + column2, mask=inside, other=0.0)
            side = tl.load(before_table + before * width + column2, mask=inside, other=0.0)
            query = query * tl.sigmoid(query) * (value.to(tl.float32) + side.to(tl.float32))
            rows = tl.load(
                candidate_table + ids[:, None] * rank + column[None, :],
                mask=(slot < count)[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(rows.to(tl.float32) * query[None, :], axis=1)
        tl.store(scores + row * count + slot, total, mask=slot < count)
        # Of NaN alone any slot may be the largest, one behind the candidates too.
        best = tl.minimum(tl.argmax(total, axis=0), count - 1)
        before = tl.load(candidates + row * count + best)
        tl.store(tokens + position + 1, before)


def walk(
    top: torch.Tensor,  # [requests, positions, m], the candidates' logits
    candidates: torch.Tensor,  # int64 [requests, positions, m], their draft ids
    projected: torch.Tensor,  # [requests, positions, width], of `PathSelector.project`
    before: torch.Tensor,  # [draft vocabulary, width], of `SelectorTables`
    candidate: torch.Tensor,  # [draft vocabulary, rank], of `SelectorTables`
    tokens: torch.Tensor,  # int64 [requests, 1 + positions], draft ids: column 0 is given
    scores: torch.Tensor,  # float32 [requests, positions, m], written
    *,
    begin: int = 0,
    end: int | None = None,
) -> None:
    """Choose the tokens of positions `begin` to `end` - 1, by default of all, into the columns of
    `tokens` behind theirs. The column `begin` is the token before the first of them."""
    (requests, positions, count), rank = candidates.shape, candidate.shape[1]
    width = before.shape[1]
    assert width == 2 * rank and len(before) == len(candidate)
    assert projected.shape == (requests, positions, width)
    assert top.shape == candidates.shape == scores.shape
    assert tokens.shape == (requests, positions + 1)
    assert (tokens.dtype, candidates.dtype) == (torch.int64, torch.int64)
    every = (top, candidates, projected, before, candidate, tokens, scores)
    assert all(x.is_contiguous() for x in every)
    walk_kernel[(requests,)](
        top, candidates, projected, before, candidate, tokens, scores,
        positions, count, rank, begin, positions if end is None else end,
        COUNT=triton.next_power_of_2(count),
        COLUMNS=min(COLUMNS, triton.next_power_of_2(rank)),
    )  # fmt: skip
