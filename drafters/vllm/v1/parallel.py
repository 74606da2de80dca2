"""P-EAGLE: all K draft tokens of a request in one pass of the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drafters.vllm.v1.drafter import Drafter
from drafters.vllm.v1.layout import Rows


class ParallelDrafter(Drafter):
    """Runs a P-EAGLE head. Draft tokens after the first come from masked positions (layout.py),
    which hold the mask token and a learned hidden state."""

    masked_per_token = 1
    carries = False

    def _propose(
        self,
        rows: Rows,
        tables: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        states: Sequence[torch.Tensor],
        common: Any,
    ) -> list[list[int]]:
        layout = self._lay_out(rows, tables, starts)
        self._enter(layout, states)
        if layout.masked.size:
            masked = self._device(layout.masked)
            shared = self.parallel_drafting_hidden_state_tensor
            self.hidden_states.index_copy_(0, masked, shared.expand(len(masked), -1))
        hidden, _ = self._pass(layout, rows, common)
        if not len(hidden):
            return [[] for _ in rows.k]
        begins = np.cumsum(rows.k) - rows.k
        owners = np.repeat(np.arange(len(rows.k)), rows.k)
        offsets = np.arange(len(owners)) - begins[owners]
        tokens = self._tokens(hidden, rows.index[owners], offsets).tolist()
        return [
            tokens[first : first + count]
            for first, count in zip(begins.tolist(), rows.k.tolist(), strict=True)
        ]
