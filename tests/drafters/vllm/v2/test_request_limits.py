"""Which drafts lie beyond their request's limit, by rows of logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from drafters.vllm.v2.request_limits import RequestLimits


def batch(slots: list[int], drafts: list[int] | None) -> Any:
    """A step's batch as vLLM describes it, with a row of logits for each draft and one more."""
    rows = [1 + n for n in drafts or [0] * len(slots)]
    return SimpleNamespace(
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
        idx_mapping_np=np.array(slots),
        expanded_idx_mapping=torch.tensor(slots).repeat_interleave(torch.tensor(rows)),
        expanded_local_pos=torch.cat([torch.arange(n) for n in rows]),
    )


def test_rows_beyond_the_limit_of_the_request_in_a_slot() -> None:
    limits = RequestLimits(4, 3, torch.device("cpu"))
    limits.set(2, 1)
    limits.set(0, 0)
    beyond = limits.beyond(batch([3, 2, 0], [3, 3, 3]))
    assert beyond is not None
    assert beyond.view(3, 4).int().tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]]
    limits.set(2, 3)  # its next request has no limit
    assert limits.beyond(batch([3, 2], [3, 3])) is None


def test_no_row_is_computed_where_the_host_sees_none_beyond() -> None:
    limits = RequestLimits(4, 3, torch.device("cpu"))
    limits.set(2, 1)
    assert limits.beyond(batch([2, 1], [1, 3])) is None
    assert limits.beyond(batch([2], None)) is None
