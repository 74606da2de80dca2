"""Copy the target's hidden states for a drafter pass, each once, straight to where `fc` reads.

Selecting from every tap, joining the taps and then joining stored states would copy each up to
three times, into newly allocated memory. This moves 2 * taps * hidden elements per row
(docs/decisions/0009; `aerie bench kernels --only inputs`, arm `once`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather(
    states: Sequence[torch.Tensor],  # taps of [rows of the step, hidden]
    fresh: torch.Tensor,  # [fresh] int64, rows of `states`
    store: torch.Tensor,  # [rows kept, taps * hidden]
    held: torch.Tensor,  # [held] int64, rows of `store`
    out: torch.Tensor,  # [>= fresh + held, taps * hidden], of the same dtype, reused by every call
) -> torch.Tensor:
    """Fill `out`, fresh rows first; returns the filled part, `[fresh + held, taps * hidden]`."""
    hidden = states[0].shape[1]
    assert out.shape[1] == store.shape[1] == len(states) * hidden
    assert {state.dtype for state in states} == {store.dtype} == {out.dtype}
    count = len(fresh)
    assert len(out) >= count + len(held)
    for tap, state in enumerate(states):
        columns = out[:count, tap * hidden : (tap + 1) * hidden]
        torch.index_select(state, 0, fresh, out=columns)
    if len(held):
        torch.index_select(store, 0, held, out=out[count : count + len(held)])
    return out[: count + len(held)]
