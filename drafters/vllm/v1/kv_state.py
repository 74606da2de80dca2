"""Which positions of each request are in the draft head's KV cache, and which it has missed.

The head's keys and values lie in blocks of the same block table as the target's. Position p of a
request is *entered* once the head has computed them from the target's hidden state at p and token
p + 1. A step without a drafter pass leaves positions that are not entered; they must be entered
before anything later is, and never attended to until then.

Two more things leave holes. A prefix found in the prefix cache may hold blocks that were filled at
K = 0. And only the newest `window` hidden states of a request are stored, so one that is further
behind has lost some. In both cases the head's context starts anew behind the hole: at
`context_start`, a multiple of the block size, so that whole blocks drop out of its block table.

In the same way a context is kept from growing beyond `longest` tokens: a head drafts worse in
contexts that are longer than those it was trained on (docs/decisions/0012).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class DrafterKVState:
    """The head's KV cache by request: positions from `context_start` up to `done` are entered, and
    the target has computed those up to `seen`. All count tokens from the start of the request."""

    def __init__(
        self, requests: int, blocks: int, block_size: int, window: int, longest: int = 0
    ) -> None:
        """All sizes are in tokens; `longest` 0 is no limit. Raises ValueError if it is shorter than
        a block."""
        if 0 < longest < block_size:
            raise ValueError(
                f"a context of {longest} tokens is shorter than blocks of {block_size}"
            )
        self.block_size = block_size
        self.window = window
        self.longest = longest
        self.context_start: Ints = np.zeros(requests, np.int64)
        self.done: Ints = np.zeros(requests, np.int64)
        self.seen: Ints = np.zeros(requests, np.int64)
        self.limit: Ints = np.zeros(requests, np.int64)
        self.whole = np.zeros(blocks, bool)  # blocks of which every position is entered
        self._slots: dict[str, int] = {}
        self._batch: list[str] | None = None  # requests of the last call of `slots`
        self._batch_slots: Ints = np.zeros(0, np.int64)
        self._free = list(range(requests - 1, -1, -1))

    def add(self, request: str, computed: int, blocks: Sequence[int], limit: int) -> None:
        """Add a request that is new in the batch, or resumed after a preemption.

        `computed` tokens were found in the prefix cache, in the first of `blocks`; `limit` is its
        largest K, and at 0 it needs no context.
        """
        slot = self._slots.get(request)
        if slot is None:
            slot = self._slots[request] = self._free.pop()
            self._batch = None
        cached = computed // self.block_size
        self.own(blocks[cached:])
        holes = np.flatnonzero(~self.whole[np.asarray(blocks[:cached], np.int64)])
        behind = int(holes[-1]) + 1 if holes.size else 0
        aligned = computed == cached * self.block_size
        self.context_start[slot] = (behind if aligned else cached + 1) * self.block_size
        self.done[slot] = self.seen[slot] = computed
        self.limit[slot] = limit

    def own(self, blocks: Sequence[int]) -> None:
        """Mark `blocks` as newly allocated: nothing of what they held is used any more."""
        if blocks:
            self.whole[np.asarray(blocks, np.int64)] = False

    def remove(self, request: str) -> None:
        """Remove a request that has ended or is preempted. The marks of its blocks stay: the prefix
        cache may keep the blocks."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
            self._batch = None

    def slots(self, requests: Sequence[str]) -> Ints:
        """Row of each request in the arrays; cached, as a batch is mostly the last step's."""
        if requests != self._batch:
            slots = map(self._slots.__getitem__, requests)
            self._batch_slots = np.fromiter(slots, np.int64, len(requests))
            self._batch = list(requests)
        return self._batch_slots

    def skip(self, slots: Ints, ends: Ints) -> None:
        """Note that the target has computed positions up to `ends`, and the head has not."""
        self.seen[slots] = ends

    def unread(self, slots: Ints) -> Ints:
        """How many positions of each request the target has computed and the head can still enter:
        those of which the hidden states are stored."""
        missed = self.seen[slots] - np.maximum(self.done[slots], self.context_start[slots])
        return np.clip(missed, 0, self.window)

    def start(self, slots: Ints, ends: Ints) -> Ints:
        """The first position that each request has to enter if it is entered up to `ends`. Starts
        its context anew where hidden states were lost, and cuts one that is too long."""
        kept = self.seen[slots] - self.window
        lost = kept > np.maximum(self.done[slots], self.context_start[slots])
        if lost.any():
            self.context_start[slots[lost]] = self._above(kept[lost])
        if self.longest:
            least = self._above(ends - self.longest)
            self.context_start[slots] = np.maximum(self.context_start[slots], least)
        return np.maximum(self.done[slots], self.context_start[slots])

    def _above(self, positions: Ints) -> Ints:
        """Positions rounded up to multiples of the block size."""
        return -(-positions // self.block_size) * self.block_size

    def enter(self, slots: Ints, ends: Ints, tables: npt.NDArray[np.int32]) -> None:
        """Note that the head has entered all positions before `ends`; `tables` are the requests'
        blocks, `[requests, blocks]`."""
        size = self.block_size
        full = np.flatnonzero(self.done[slots] // size != ends // size)
        for row in full:
            begin = max(int(self.done[slots[row]]), int(self.context_start[slots[row]])) // size
            # Entered from the middle only if the part before it was entered earlier.
            self.whole[tables[row, begin : int(ends[row]) // size]] = True
        self.done[slots] = self.seen[slots] = ends
