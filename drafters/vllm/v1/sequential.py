"""EAGLE-3: the draft tokens of a request one after another, each in a pass of the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drafters.vllm.v1.drafter import Drafter
from drafters.vllm.v1.layout import Rows, following


class SequentialDrafter(Drafter):
    """Runs an EAGLE-3 head. The first pass enters the target's hidden states and drafts one token
    for each request. Each later pass reads one token a request, its newest draft token, with the
    head's hidden state that this token came from. A request whose draft is complete is in no
    further pass.
    """

    masked_per_token = 0
    carries = True

    def _propose(
        self,
        rows: Rows,
        tables: npt.NDArray[np.int32],
        query_start_loc: npt.NDArray[np.int32],
        states: Sequence[torch.Tensor],
        common: Any,
    ) -> list[list[int]]:
        now = replace(rows, k=np.minimum(rows.k, 1))
        layout = self._lay_out(now, tables, query_start_loc)
        self._enter(layout, states)
        hidden, carried = self._pass(layout, now, common)

        which = np.flatnonzero(rows.k)  # the requests of this pass, as entries of `rows`
        owners, found = [], []
        for depth in range(1, int(rows.k.max()) + 1):
            ids = self._tokens(hidden, rows.index[which], np.full(len(which), depth - 1))
            owners.append(which)
            found.append(ids)
            goes_on = np.flatnonzero(rows.k[which] > depth)
            if not goes_on.size:
                break
            if goes_on.size < which.size:
                left = self._device(goes_on)
                ids, carried, which = ids[left], carried[left], which[goes_on]
            now = following(rows, which, depth)
            layout = self._lay_out(now, tables, query_start_loc)
            count = len(which)
            self.input_ids[:count] = ids
            self.positions[:count] = self._device(layout.positions)
            self.hidden_states[:count] = carried
            hidden, carried = self._pass(layout, now, common, depth)

        drafts: list[list[int]] = [[] for _ in rows.k]
        if found:
            tokens = torch.cat(found).tolist()  # the device is waited for once
            for row, token in zip(np.concatenate(owners).tolist(), tokens, strict=True):
                drafts[row].append(token)
        return drafts
