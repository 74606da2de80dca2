"""The head's output matrix on a GPU: hidden states -> most probable tokens, no logits in memory.

Each program multiplies a block of rows with its share of the vocabulary and keeps, for each row,
the largest logit m, its index, and s = sum exp(logit - m). A second launch joins the shares:
M = max m, S = sum s * exp(m - M), probability 1 / S. Read: the weight once per block of rows;
written: 16 bytes per row and share. Not timed on a GPU yet, and not in the serving path.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments get types only when it is compiled.
from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, WORDS, DEPTH = 16, 128, 64  # a tile of rows x vocabulary, and of the sum over hidden
SHARES = 512  # at most: a few programs for each multiprocessor


@triton.jit
def share_kernel(
    hidden, weight, largest, where, total, rows, words, depth, tiles, shares,
    ROWS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Largest logit, its index and the sum of exponentials in one share of the vocabulary."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    share = tl.program_id(1)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    best = tl.zeros([ROWS], tl.int32)
    for tile in range(share * tiles, (share + 1) * tiles):
        word = tile * WORDS + tl.arange(0, WORDS)
        logits = tl.zeros([ROWS, WORDS], tl.float32)
        for begin in range(0, depth, DEPTH):
            column = begin + tl.arange(0, DEPTH)
            a = tl.load(
                hidden + row[:, None].to(tl.int64) * depth + column[None, :],
                mask=(row[:, None] < rows) & (column[None, :] < depth), other=0.0,
            )  # fmt: skip
            b = tl.load(
                weight + word[None, :].to(tl.int64) * depth + column[:, None],
                mask=(word[None, :] < words) & (column[:, None] < depth), other=0.0,
            )  # fmt: skip
            logits = tl.dot(a, b, logits, input_precision="ieee")
        logits = tl.where(word[None, :] < words, logits, float("-inf"))
        # NaN counts as +inf in the search, and stays NaN in the sum.
        ranked = tl.where(logits != logits, float("inf"), logits)
        top = tl.max(ranked, 1)
        here = tile * WORDS + tl.argmax(ranked, 1, tie_break_left=True)
        new = tl.maximum(m, top)
        # In a row of -inf alone, -inf less -inf would be NaN.
        shift = tl.where(new == float("-inf"), 0.0, new)
        s = s * tl.exp(m - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
        best = tl.where(top > m, here, best)
        m = new
    at = row * shares + share
    tl.store(largest + at, m, mask=row < rows)
    tl.store(where + at, best, mask=row < rows)
    tl.store(total + at, s, mask=row < rows)


@triton.jit
def join_kernel(
    largest, where, total, offsets, ids, probabilities, shares,
    OFFSETS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Join the shares of a row: most probable token and its probability."""
    row = tl.program_id(0)
    share = tl.arange(0, SHARES)
    inside = share < shares
    m = tl.load(largest + row * shares + share, mask=inside, other=float("-inf"))
    s = tl.load(total + row * shares + share, mask=inside, other=0.0)
    top = tl.max(m, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    joined = tl.sum(s * tl.exp(m - shift), 0)
    # Shares lie in the vocabulary's order: the first of equals has the lowest id.
    best = tl.load(where + row * shares + tl.argmax(m, 0, tie_break_left=True)).to(tl.int64)
    if OFFSETS:
        best += tl.load(offsets + best)
    tl.store(ids + row, best)
    finite = (top > float("-inf")) & (top < float("inf"))
    tl.store(probabilities + row, tl.where(finite, 1.0 / joined, float("nan")))


def likeliest(
    hidden: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.likeliest`, with sums in float32, not rounded to the weight's dtype."""
    (rows, depth), words = hidden.shape, weight.shape[0]
    assert weight.shape[1] == depth and hidden.dtype == weight.dtype
    assert hidden.is_contiguous() and weight.is_contiguous()
    assert offsets is None or (offsets.dtype == torch.int64 and offsets.is_contiguous())
    tiles = triton.cdiv(triton.cdiv(words, WORDS), SHARES)
    shares = triton.cdiv(triton.cdiv(words, WORDS), tiles)
    device = hidden.device
    largest = torch.empty((rows, shares), dtype=torch.float32, device=device)
    where = torch.empty((rows, shares), dtype=torch.int32, device=device)
    total = torch.empty_like(largest)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    probabilities = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return ids, probabilities
    share_kernel[(triton.cdiv(rows, ROWS), shares)](
        hidden, weight, largest, where, total, rows, words, depth, tiles, shares,
        ROWS=ROWS, WORDS=WORDS, DEPTH=DEPTH,
    )  # fmt: skip
    join_kernel[(rows,)](
        largest, where, total, ids if offsets is None else offsets, ids, probabilities, shares,
        OFFSETS=offsets is not None, SHARES=triton.next_power_of_2(shares),
    )  # fmt: skip
    return ids, probabilities
