"""The record of which positions are in the draft head's KV cache."""

from __future__ import annotations

import numpy as np
import pytest

from drafters.vllm.v1.kv_state import DrafterKVState, Ints

SIZE, WINDOW = 4, 6


def one(*values: int) -> Ints:
    return np.array(values, np.int64)


@pytest.fixture
def contexts() -> DrafterKVState:
    return DrafterKVState(requests=2, blocks=16, block_size=SIZE, window=WINDOW)


def read(contexts: DrafterKVState, blocks: list[int], until: int, name: str = "a") -> None:
    """A request enters `until` tokens in `blocks` and ends."""
    contexts.add(name, 0, blocks, 5)
    contexts.enter(contexts.slots([name]), one(until), np.array([blocks], np.int32))
    contexts.remove(name)


def test_a_block_is_whole_at_its_last_position_and_not_before(contexts: DrafterKVState) -> None:
    """Catches: off by one at the end of a block, either way."""
    read(contexts, [3, 4], 7)
    assert contexts.whole[3] and not contexts.whole[4]
    read(contexts, [5, 6], 8)
    assert contexts.whole[5] and contexts.whole[6]


@pytest.mark.parametrize(("whole", "first"), [((1, 1), 0), ((0, 1), 4), ((1, 0), 8), ((0, 0), 8)])
def test_a_context_starts_behind_the_last_hole(
    contexts: DrafterKVState, whole: tuple[int, int], first: int
) -> None:
    """Catches: a hole attended to because blocks behind it, or before it, are whole; a context that
    starts anew for no reason, at every hit of the prefix cache."""
    contexts.whole[[3, 4]] = whole
    contexts.add("b", 8, [3, 4, 6], 5)
    slot = contexts.slots(["b"])
    assert contexts.start(slot, contexts.seen[slot]) == [8]
    assert contexts.context_start[slot] == [first]


def test_a_hit_inside_a_block_starts_behind_it(contexts: DrafterKVState) -> None:
    """Catches: the copied half of a block, of whose keys nothing is known, attended to."""
    read(contexts, [3, 4], 8)
    contexts.add("b", 6, [3, 7], 5)
    slot = contexts.slots(["b"])
    assert contexts.start(slot, contexts.seen[slot]) == [8] and not contexts.whole[7]
    contexts.skip(slot, one(7))  # the rest of the block is kept for nobody
    assert contexts.start(slot, contexts.seen[slot]) == [8]


def test_a_block_that_changes_hands_is_not_whole(contexts: DrafterKVState) -> None:
    """Catches: keys of the owner before attended to, for blocks of a new and of a grown request."""
    read(contexts, [3, 4], 8)
    contexts.add("b", 0, [3], 5)
    contexts.own([4])
    assert not contexts.whole.any()


@pytest.mark.parametrize(
    ("seen", "first", "start"),
    [
        (8 + WINDOW, 0, 8),  # the store holds all that was missed
        (8 + WINDOW + 1, 12, 12),
        (8 + WINDOW + 4, 12, 12),  # what is kept begins with a block
        (8 + WINDOW + 5, 16, 16),
    ],
)
def test_what_the_store_lost_starts_the_context_anew(
    contexts: DrafterKVState, seen: int, first: int, start: int
) -> None:
    """Catches: off by one in the store's reach; a context that begins inside a block."""
    contexts.add("a", 0, [3, 4], 5)
    slot = contexts.slots(["a"])
    contexts.enter(slot, one(8), np.array([[3, 4]], np.int32))
    contexts.skip(slot, one(seen))
    assert contexts.start(slot, contexts.seen[slot]) == [start]
    assert contexts.context_start[slot] == [first]


def test_a_lost_part_leaves_its_blocks_unmarked(contexts: DrafterKVState) -> None:
    """Catches: a block marked whole because positions behind it were entered."""
    contexts.add("a", 0, [3, 4, 5, 6], 5)
    slot = contexts.slots(["a"])
    contexts.enter(slot, one(6), np.array([[3, 4, 5, 6]], np.int32))
    contexts.skip(slot, one(15))
    # From 12: block 4 has a hole from 6, block 5 was never entered.
    contexts.start(slot, contexts.seen[slot])
    contexts.enter(slot, one(16), np.array([[3, 4, 5, 6]], np.int32))
    assert np.flatnonzero(contexts.whole).tolist() == [3, 6]


def test_a_window_smaller_than_a_block_waits_for_the_next() -> None:
    """Catches: a start behind what the target has read taken for something to enter."""
    small = DrafterKVState(requests=1, blocks=8, block_size=SIZE, window=2)
    small.add("a", 0, [1, 2], 5)
    slot = small.slots(["a"])
    small.skip(slot, one(3))
    assert small.start(slot, small.seen[slot]) == [4]
    small.skip(slot, one(5))
    assert small.start(slot, small.seen[slot]) == [4] and small.context_start[slot] == [4]


def test_a_request_that_comes_back_begins_again(contexts: DrafterKVState) -> None:
    """Catches: what was entered before a preemption believed of blocks that are new."""
    contexts.add("a", 0, [3, 4], 5)
    contexts.enter(contexts.slots(["a"]), one(7), np.array([[3, 4]], np.int32))
    contexts.remove("a")
    contexts.add("b", 0, [4], 5)
    contexts.add("a", 0, [5, 6], 5)
    slot = contexts.slots(["a"])
    assert contexts.start(slot, contexts.seen[slot]) == [0] and contexts.seen[slot] == [0]


def test_rows_are_given_back(contexts: DrafterKVState) -> None:
    """Catches: rows that leak with requests that end, or end twice."""
    for name in "abcdefgh":
        contexts.add(name, 0, [1], 0)
        contexts.remove(name)
        contexts.remove(name)
    contexts.add("x", 0, [1], 0)
    contexts.add("y", 0, [2], 0)
    assert sorted(contexts.slots(["y", "x"]).tolist()) == [0, 1]


@pytest.mark.parametrize(("end", "first"), [(10, 0), (11, 4), (14, 4), (15, 8)])
def test_a_context_that_is_too_long_is_cut_at_a_block(end: int, first: int) -> None:
    """Catches: off by one in the length; a cut inside a block."""
    short = DrafterKVState(requests=1, blocks=8, block_size=SIZE, window=WINDOW, longest=10)
    short.add("a", 0, [1, 2, 3, 4], 5)
    slot = short.slots(["a"])
    short.enter(slot, one(8), np.array([[1, 2, 3, 4]], np.int32))
    assert short.start(slot, one(end)) == [8]
    assert short.context_start[slot] == [first] and first % SIZE == 0


def test_a_long_prompt_is_entered_from_where_the_context_reaches() -> None:
    """Catches: blocks that the cut left out marked whole."""
    short = DrafterKVState(requests=1, blocks=8, block_size=SIZE, window=WINDOW, longest=10)
    short.add("a", 0, [1, 2, 3, 4], 5)
    slot = short.slots(["a"])
    assert short.start(slot, one(15)) == [8]
    short.enter(slot, one(15), np.array([[1, 2, 3, 4]], np.int32))
    assert np.flatnonzero(short.whole).tolist() == [3]


def test_a_limit_must_hold_a_block() -> None:
    with pytest.raises(ValueError, match="blocks of 4"):
        DrafterKVState(requests=1, blocks=8, block_size=SIZE, window=WINDOW, longest=3)
