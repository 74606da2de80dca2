"""Drafts of requests that are not greedy, drawn with the noise of the tokens that they predict.

vLLM's V2 sampler takes the argmax of a position's logits / T plus Gumbel noise, which depends on
the request's seed, the position and the token (v1/worker/gpu/sample/gumbel.py). The drafter adds
the same noise to its own logits / T: coupling without communication (arXiv 2408.07978), as on V1
(drafters/vllm/verification/sampled_drafts.py). That leaves the text's law alone only if drafts are
compared with the target's own token (rejection_sampler.py). vLLM's test by a ratio of probabilities
needs drafts that are independent of its noise.

One program for each draft reads its logits once for the largest one, BISECTIONS times more for each
of top-k and top-p that the request has, and once for the draft. Those of greedy requests end at
once, so that a CUDA graph can hold the kernel for any batch.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments get types only when it is compiled.
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

COLUMNS = 4096  # logits of a row that are read together
# The bounds of top-k and top-p are looked for in steps of 20 / 2**12 = 0.005 below the largest
# logit. All of 150,000 tokens that are 20 or more below it have a probability of 0.0003 together,
# and are not drafted.
BISECTIONS = 12
DEPTH = 20.0


class DeviceDraftSampling:
    """What the requests in vLLM's slots are sampled with, in tensors that CUDA graphs can keep."""

    def __init__(self, states: Any, device: torch.device, *, use_fp64: bool) -> None:
        """`states`: SamplingStates of vLLM's sampler. `use_fp64`: whether that one draws its noise
        in float64."""
        self._states = states
        self._use_fp64 = use_fp64
        slots = states.max_num_reqs
        self.temperature = torch.zeros(slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(slots, dtype=torch.float32, device=device)
        self._all_greedy = True  # whether all of `temperature` is 0

    def refresh(self, slots: npt.NDArray[np.integer[Any]]) -> None:
        """Take over the options of a batch's requests, before its drafts are drawn. A batch of
        greedy requests behind others like it copies nothing, whatever ended requests have left in
        other slots."""
        states = self._states
        if not states.temperature.np[slots].any():
            if not self._all_greedy:
                self.temperature.zero_()
            self._all_greedy = True
            return
        for name in ("temperature", "seeds", "top_k", "top_p", "min_p"):
            getattr(self, name).copy_(getattr(states, name).gpu)
        self._all_greedy = False

    def draw(
        self,
        tokens: torch.Tensor,  # int64 [requests * k], written for requests with T > 0
        logits: torch.Tensor,  # [requests * k, columns], a request's drafts in succession
        ids: torch.Tensor | None,  # int64 [columns] or [requests * k, columns], the target's ids
        slots: torch.Tensor,  # [requests]; -1: padding, whose tokens stay
        positions: torch.Tensor,  # [requests], of the token before the request's first draft
    ) -> None:
        """Draw drafts with the noise of the target's tokens in their place.

        Top-k, top-p and min-p cut the law of `logits` as they cut the target's, the first two up to
        0.005 in a logit. Without `ids` a column is the target's id of the same number."""
        (drafts, columns), requests = logits.shape, len(slots)
        assert len(tokens) == drafts and drafts % requests == 0 and len(positions) == requests
        assert tokens.dtype == torch.int64 and logits.stride(1) == 1
        assert slots.is_contiguous() and positions.is_contiguous() and tokens.is_contiguous()
        assert ids is None or (ids.is_contiguous() and ids.shape[-1] == columns)
        draw_kernel[(drafts,)](
            tokens, logits, logits.stride(0), columns,
            ids, 0 if ids is None or ids.dim() == 1 else columns,
            slots, positions, drafts // requests,
            self.temperature, self.seeds, self.top_k, self.top_p, self.min_p,
            COLUMNS=min(COLUMNS, triton.next_power_of_2(columns)), BISECTIONS=BISECTIONS,
            DEPTH=DEPTH, USE_FP64=self._use_fp64, num_warps=8,
        )  # fmt: skip


@triton.jit
def _scaled(logits, columns, begin, temperature, COLUMNS: tl.constexpr):
    """Logits / T of the columns from `begin` on, and whether they exist."""
    column = begin + tl.arange(0, COLUMNS)
    here = column < columns
    values = tl.load(logits + column, mask=here, other=float("-inf")).to(tl.float32)
    return column, here, values / temperature


@triton.jit
def _above(logits, columns, temperature, most, bound, COLUMNS: tl.constexpr):
    """How many logits / T are above `bound`, and the sum of their exponentials less `most`."""
    counts = tl.zeros((COLUMNS,), tl.int32)
    masses = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, columns, COLUMNS):
        _, _, values = _scaled(logits, columns, begin, temperature, COLUMNS)
        above = values > bound
        counts += above.to(tl.int32)
        masses += tl.where(above, tl.exp(values - most), 0.0)
    # Threads meet once a pass over the row, not once a block of it.
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit(do_not_specialize=["k"])
def draw_kernel(
    tokens, logits, stride, columns, ids, ids_stride, slots, positions, k,
    temperatures, seeds, top_ks, top_ps, min_ps,
    COLUMNS: tl.constexpr, BISECTIONS: tl.constexpr, DEPTH: tl.constexpr, USE_FP64: tl.constexpr,
):  # fmt: skip
    """Draw the draft of one row of logits, unless its request is greedy."""
    draft = tl.program_id(0).to(tl.int64)
    request = draft // k
    slot = tl.load(slots + request).to(tl.int64)
    temperature = tl.load(temperatures + slot, mask=slot >= 0, other=0.0)
    if temperature == 0.0:
        return
    logits += draft * stride
    largest = tl.full((COLUMNS,), float("-inf"), tl.float32)
    for begin in range(0, columns, COLUMNS):
        _, _, values = _scaled(logits, columns, begin, temperature, COLUMNS)
        largest = tl.maximum(largest, values)
    most = tl.max(largest, axis=0)

    low = tl.maximum(most - DEPTH, most + tl.log(tl.load(min_ps + slot)))
    top_k, top_p = tl.load(top_ks + slot), tl.load(top_ps + slot)
    # The tokens above `low` are enough for a filter, those above `high` are not.
    if top_k < columns:
        high = most
        for _ in range(BISECTIONS):
            middle = (low + high) * 0.5
            count, _mass = _above(logits, columns, temperature, most, middle, COLUMNS)
            low = tl.where(count >= top_k, middle, low)
            high = tl.where(count >= top_k, high, middle)
    if top_p < 1.0:
        high = most
        _count, total = _above(logits, columns, temperature, most, low, COLUMNS)
        for _ in range(BISECTIONS):
            middle = (low + high) * 0.5
            _count, mass = _above(logits, columns, temperature, most, middle, COLUMNS)
            low = tl.where(mass >= top_p * total, middle, low)
            high = tl.where(mass >= top_p * total, high, middle)

    seed = tl.load(seeds + slot)
    position = tl.load(positions + request).to(tl.int64) + draft % k
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.load(tokens + draft)
    for begin in range(0, columns, COLUMNS):
        column, here, values = _scaled(logits, columns, begin, temperature, COLUMNS)
        keys = column
        if ids is not None:
            keys = tl.load(ids + draft * ids_stride + column, mask=here, other=0)
        allowed = here & (values >= low)
        value, index = gumbel_noised_argmax(
            values, keys, allowed, seed, position, temperature,
            IS_DRAFTING=False, USE_FP64=USE_FP64, APPLY_TEMPERATURE=False,
        )  # fmt: skip
        if value > best:
            best = value.to(tl.float32)
            chosen = begin + index
            if ids is not None:
                token = tl.load(ids + draft * ids_stride + chosen)
            else:
                token = chosen.to(tl.int64)
    tl.store(tokens + draft, token)
