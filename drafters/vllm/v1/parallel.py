"""P-EAGLE: all K draft tokens of a request in one pass of the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drafters.vllm.path_selector import ServedSelector
from drafters.vllm.v1.drafter import Drafter, Ints
from drafters.vllm.v1.layout import Rows
from drafters.vllm.verification.greedy import target_ids


class ParallelDrafter(Drafter):
    """Runs a P-EAGLE head. Draft tokens after the first come from masked positions (layout.py),
    which hold the mask token and a learned hidden state. If the head has a path selector, it
    chooses them one after another behind the first, without another pass."""

    masked_per_token = 1
    carries = False

    def _propose(
        self,
        rows: Rows,
        tables: npt.NDArray[np.int32],
        query_start_loc: npt.NDArray[np.int32],
        states: Sequence[torch.Tensor],
        common: Any,
    ) -> list[list[int]]:
        layout = self._lay_out(rows, tables, query_start_loc)
        self._enter(layout, states)
        if layout.masked.size:
            masked = self._device(layout.masked)
            shared = self.parallel_drafting_hidden_state_tensor
            self.hidden_states.index_copy_(0, masked, shared.expand(len(masked), -1))
        hidden, _ = self._pass(layout, rows, common)
        if not len(hidden):
            return [[] for _ in rows.k]
        first_draft = np.cumsum(rows.k) - rows.k
        owners = np.repeat(np.arange(len(rows.k)), rows.k)
        offsets = np.arange(len(owners)) - first_draft[owners]
        if self.selector is None or rows.k.max() < 2:
            tokens = self._tokens(hidden, rows.index[owners], offsets).tolist()
        else:
            tokens = self._walk(self.selector, hidden, rows, first_draft).tolist()
        return [
            tokens[first : first + count]
            for first, count in zip(first_draft.tolist(), rows.k.tolist(), strict=True)
        ]

    def _walk(
        self, selector: ServedSelector, hidden: torch.Tensor, rows: Rows, first_draft: Ints
    ) -> torch.Tensor:
        """Draft tokens `[drafts]` from hidden states `[drafts, hidden]`, along the path that the
        selector chooses; `first_draft` says where those of each of `rows` begin."""
        which = np.flatnonzero(rows.k)
        counts = rows.k[which]
        owners = rows.index[which]
        longest = int(counts.max())
        logits = self._logits(hidden)
        uniform = bool((counts == longest).all())
        if not uniform:  # those of shorter drafts are filled up with what nobody reads
            columns = np.minimum(np.arange(longest), counts[:, None] - 1)
            places = self._device((first_draft[which, None] + columns).ravel())
            hidden, logits = hidden[places], logits[places]
        hidden, logits = (x.view(len(which), longest, -1) for x in (hidden, logits))
        zeros = np.zeros_like(owners)
        first = selector.to_draft(self._drawn(logits[:, 0], owners, zeros))

        def draw(scores: torch.Tensor, candidates: torch.Tensor, position: int) -> torch.Tensor:
            wide = selector.module.over_vocabulary(scores, candidates, logits.shape[-1])
            return selector.to_draft(self._drawn(wide, owners, zeros + position + 1))

        pick = None if self._sampling is None else draw
        later = selector.walk(hidden[:, 1:], logits[:, 1:], first, pick)
        tokens = target_ids(self.model, torch.cat([first[:, None], later], dim=1))
        if uniform:
            return tokens.flatten()
        return tokens[self._device(np.arange(longest) < counts[:, None])]
