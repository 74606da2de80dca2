"""The layout of a pass equals its definition, token by token."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.vllm.v1.layout import Rows, lay_out, stored

MASK, LONGEST = 999, 24


@st.composite
def passes(draw: st.DrawFn) -> tuple[Rows, dict[str, Any]]:
    """Requests of a batch, some in the pass: held and fresh positions, any K, none too, up to the
    end of the history; blocks and rows in any order."""
    size = draw(st.sampled_from([1, 3, 4, 16]))
    window = draw(st.integers(1, 12))
    batch = draw(st.integers(1, 5))
    index = sorted(draw(st.sets(st.integers(0, batch - 1), min_size=1)))
    slots = draw(st.permutations(range(batch)))
    values: dict[str, list[int]] = {field.name: [] for field in fields(Rows)}
    read = [draw(st.integers(1, 6)) for _ in range(batch)]  # by the target, in this step
    for row in index:
        end = draw(st.integers(1, LONGEST - 1))
        fresh = draw(st.integers(0, min(read[row], end)))
        # Fewer entered than read: the rest was rejected, or lies before a context begun anew.
        start = draw(st.integers(max(0, end - fresh - window), end - 1))
        first = draw(st.integers(0, start // size)) * size
        k = draw(st.integers(0, LONGEST - end))
        for name, value in zip(
            values, (row, slots[row], first, start, end - fresh, end, k, 500 + row), strict=True
        ):
            values[name].append(value)
    blocks = -(-LONGEST // size)
    tables = np.random.default_rng(draw(st.integers(0, 9))).permutation(batch * blocks)
    tokens = np.arange(batch * LONGEST).reshape(batch, LONGEST)
    rows = Rows(**{name: np.array(value, np.int64) for name, value in values.items()})
    return rows, {
        "tokens": tokens.astype(np.int32),
        "tables": tables.reshape(batch, blocks).astype(np.int32),
        "query_start_loc": np.cumsum([0, *read]).astype(np.int32),
        "block_size": size,
        "window": window,
        "mask_token": MASK,
    }


def by_token(rows: Rows, given: dict[str, Any]) -> dict[str, list[int]]:
    """The definition: one token after another."""
    found: dict[str, list[int]] = {
        name: [] for name in ("ids", "positions", "slots", "context", "masked", "held",
                              "held_from", "fresh", "fresh_from", "drafts")
    }  # fmt: skip
    found["queries"] = [0]
    size = given["block_size"]
    for row, index in enumerate(rows.index):
        start, end, k = rows.start[row], rows.end[row], rows.k[row]
        for position in range(start, end + max(k - 1, 0)):
            token = len(found["ids"])
            found["positions"].append(position)
            block = given["tables"][index][position // size]
            found["slots"].append(block * size + position % size)
            if position >= end:
                found["ids"].append(MASK)
                found["masked"].append(token)
            else:
                newest = position == end - 1
                found["ids"].append(
                    rows.newest[row] if newest else given["tokens"][index][position + 1]
                )
                if position < rows.num_computed_tokens[row]:
                    found["held"].append(token)
                    window = given["window"]
                    found["held_from"].append(rows.slot[row] * window + position % window)
                else:
                    found["fresh"].append(token)
                    found["fresh_from"].append(
                        given["query_start_loc"][index] + position - rows.num_computed_tokens[row]
                    )
            if k and position >= end - 1:
                found["drafts"].append(token)
        found["queries"].append(len(found["ids"]))
        found["context"].append(
            len(found["ids"]) - found["queries"][-2] + start - rows.context_start[row]
        )
    return found


@settings(max_examples=300)
@given(passes())
def test_every_token_is_where_the_definition_has_it(case: tuple[Rows, dict[str, Any]]) -> None:
    """Catches: off by one at a request's ends, at a block's, at the history's; the ring; K = 0
    and K = 1 (no masks), and a request with nothing fresh or nothing held; and int64 ids, which
    vLLM's buffers would not take on a GPU without a copy."""
    rows, given = case
    layout, expected = lay_out(rows, **given), by_token(rows, given)
    for field in fields(layout):
        values = getattr(layout, field.name)
        assert values.tolist() == expected[field.name], field.name
        narrow = field.name in ("ids", "queries", "context")
        assert values.dtype == (np.int32 if narrow else np.int64), field.name


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 99))
def test_a_ring_keeps_the_newest(window: int, slot: int, end: int) -> None:
    """Catches: two of the newest `window` positions in one row, or a row of another request."""
    positions = np.arange(max(0, end - window), end)
    rows = stored(np.full(len(positions), slot), positions, window)
    assert len(set(rows.tolist())) == len(rows)
    assert all(row // window == slot for row in rows)
