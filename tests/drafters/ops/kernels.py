"""The Triton kernels against their references, on a GPU or in Triton's interpreter.

pytest does not collect this file: Triton reads TRITON_INTERPRET when it is imported, so
test_kernels.py runs these tests in a process of their own, and `make gpu-check` on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ops import inputs_triton, reference
from drafters.vllm.v1.layout import Rows, lay_out
from tests.drafters.vllm.v1.test_layout import passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def states(rows: int, width: int, seed: int) -> torch.Tensor:
    """Hidden states of which no two are equal, and none is zero."""
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(rows * width, generator=random).view(rows, width).float() + 1


def requests(rows: Rows) -> tuple[reference.Requests, int]:
    """The requests of a layout, and the tokens of its pass."""
    names = ("index", "slot", "start", "num_computed_tokens", "end", "newest")
    given = {name: torch.from_numpy(getattr(rows, name)) for name in names}
    lengths = torch.from_numpy(rows.end - rows.start + np.maximum(rows.k - 1, 0))
    query_start, stop = lengths.cumsum(0) - lengths, given["start"] + lengths
    return reference.Requests(**given, stop=stop, query_start=query_start), int(lengths.sum())


def both(rows: Rows, given: dict[str, Any], taps: int, hidden: int) -> tuple[Any, Any, Any]:
    """Kernel, reference, and layout with what drafter.py gathers by it."""
    layout = lay_out(rows, **given)
    found, count = requests(rows)
    step = [states(int(given["query_start_loc"][-1]), hidden, tap) for tap in range(taps)]
    store = -states((int(rows.slot.max()) + 1) * given["window"], taps * hidden, 9) - 1
    arguments = {
        **{name: torch.from_numpy(given[name]) for name in ("tokens", "tables", "query_start_loc")},
        **{name: given[name] for name in ("block_size", "window", "mask_token")},
    }
    by_slot = torch.zeros((int(rows.slot.max()) + 1, given["tokens"].shape[1]), dtype=torch.int32)
    by_slot[rows.slot] = arguments["tokens"][rows.index]
    arguments["tokens"] = by_slot
    expected = reference.enter(found, count, states=step, store=store, **arguments)
    out = (
        torch.full((count,), -7, dtype=torch.int32, device=DEVICE),
        torch.full((count,), -7, device=DEVICE),
        torch.full((count,), -7, device=DEVICE),
        torch.zeros((count, taps * hidden), device=DEVICE),
    )
    moved = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    packed = inputs_triton.pack(found).to(DEVICE)
    inputs_triton.enter(
        packed, states=[state.to(DEVICE) for state in step], store=store.to(DEVICE),
        **dict(zip(("ids", "positions", "slots", "gathered"), out, strict=True)), **moved,
    )  # fmt: skip
    gathered = torch.zeros(count, taps * hidden)
    gathered[layout.fresh] = torch.cat([state[layout.fresh_from] for state in step], dim=-1)
    gathered[layout.held] = store[layout.held_from]
    planned = (layout.ids, layout.positions, layout.slots, gathered)

    combined = expected[3][:, :hidden].contiguous()
    shared = torch.full((hidden,), 0.5)
    spread = torch.full((count, hidden), torch.nan, device=DEVICE)
    inputs_triton.spread(packed, combined.to(DEVICE), shared.to(DEVICE), spread)
    final = combined.clone()
    final[layout.masked] = shared
    return (
        [*(x.cpu() for x in out), spread.cpu()],
        [*expected, reference.spread(found, combined, shared, count)],
        [*map(torch.as_tensor, planned), final],
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(passes(), st.sampled_from([(1, 3), (2, 8), (3, 5), (5, 4)]))
def test_inputs_are_those_of_the_layout(case: Any, shape: tuple[int, int]) -> None:
    """Catches: off by one where a request, a block or the history ends; K of 0 and 1, which have
    no masked position; the ring's turn; a held state taken for a fresh one; a tap out of place."""
    kernel, expected, planned = both(*case, *shape)
    for name, *three in zip(
        ("ids", "positions", "slots", "gathered", "spread"), kernel, expected, planned, strict=True
    ):
        assert torch.equal(three[1], three[2]), f"reference: {name}"
        assert torch.equal(three[0], three[1]), f"kernel: {name}"


def test_a_wide_state_is_copied_whole() -> None:
    """Catches: columns lost where a state takes several programs and not a whole number of them;
    a bisection that is a step short for a number of requests that is a power of two."""
    for count in (1, 2, 7, 8, 9):
        every = np.arange(count, dtype=np.int64)
        rows = Rows(every, every, every * 0, every * 0 + 1, every * 0 + 2, every * 0 + 4,
                    every % 4, every + 500)  # fmt: skip
        given = {
            "tokens": np.arange(count * 16, dtype=np.int32).reshape(count, 16),
            "tables": np.arange(count * 4, dtype=np.int32).reshape(count, 4),
            "query_start_loc": np.arange(count + 1, dtype=np.int32) * 2,
            "block_size": 4, "window": 4, "mask_token": 3,
        }  # fmt: skip
        for one, other in zip(*both(rows, given, 3, inputs_triton.COLUMNS + 7)[:2], strict=True):
            assert torch.equal(one, other)


def test_positions_that_are_not_kept() -> None:
    """Catches: what the V2 runner asks beyond a layout: a request without a place in the KV cache,
    one whose last tokens have none."""
    longest, taps, hidden, window = 12, 2, 5, 4
    fields = {
        "index": [0, 1, 2], "slot": [5, 0, 3], "start": [2, 4, 8], "num_computed_tokens": [4, 4, 9],
        "end": [6, 7, 11], "stop": [8, 0, 12], "newest": [70, 71, 72], "query_start": [0, 7, 12],
    }  # fmt: skip
    count = 18  # 7, 5 and 6 tokens: of 4, 3 and 3 entered ones the others are masked
    found = reference.Requests(**{name: torch.tensor(fields[name]) for name in fields})
    step = [states(9, hidden, tap) for tap in range(taps)]
    given: dict[str, Any] = {
        "tokens": torch.arange(6 * longest, dtype=torch.int32).view(6, longest),
        "tables": torch.arange(3 * 3, dtype=torch.int32).view(3, 3) + 1,
        "query_start_loc": torch.tensor([0, 2, 5, 9], dtype=torch.int32),
        "states": step, "store": -states(6 * window, taps * hidden, 9) - 1,
        "block_size": 4, "window": window, "mask_token": 3,
    }  # fmt: skip
    expected = reference.enter(found, count, **given)
    assert expected[1].max() == longest - 1
    assert expected[2].lt(0).tolist() == [False] * 6 + [True] * 6 + [False] * 4 + [True] * 2
    assert expected[3][4:7].eq(0).all() and expected[3][7:10].ne(0).all()
    out = [torch.zeros_like(x, device=DEVICE) for x in expected]
    moved = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    moved["states"] = [state.to(DEVICE) for state in step]
    packed = inputs_triton.pack(found).to(DEVICE)
    names = ("ids", "positions", "slots", "gathered")
    inputs_triton.enter(packed, **dict(zip(names, out, strict=True)), **moved)
    for name, one, other in zip(names, out, expected, strict=True):
        assert torch.equal(one.cpu(), other), name
    shared, combined = torch.full((hidden,), 0.5), expected[3][:, :hidden].contiguous()
    spread = torch.empty((count, hidden), device=DEVICE)
    inputs_triton.spread(packed, combined.to(DEVICE), shared.to(DEVICE), spread)
    assert torch.equal(spread.cpu(), reference.spread(found, combined, shared, count))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_a_pass_is_planned_from_what_the_device_knows(data: st.DataObject) -> None:
    """Catches: a request that pads taken for one, a rejected draft taken for an accepted one, a row
    read behind the last request, a request at the end of the longest context, K that is no power of
    two, a dummy that is kept, what was kept entered without what the step read."""
    draw, longest = data.draw, 40
    most = longest - draw(st.integers(0, 4))  # as when vLLM lowers max_model_len after start
    count, k = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    padded = count + draw(st.integers(0, 3))
    fresh, kept = draw(st.booleans()), draw(st.booleans())

    def each(low: int, high: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    read, held = each(1, 6), each(0, 4)
    rejected = np.minimum(each(0, 5), read - 1)
    computed = each(4, longest - 2)
    unpadded_lens = held + read * fresh + max(0, k - 1)
    query_lens = unpadded_lens + each(0, 3)
    query_start_loc = np.concatenate([[0], np.cumsum(read)])
    positions = np.concatenate([s + np.arange(n) for s, n in zip(computed, read, strict=True)])
    slots = torch.tensor(draw(st.permutations(range(7)))[:count])
    given: dict[str, Any] = {
        "slots": slots.int() if draw(st.booleans()) else slots,
        "query_start_loc": torch.from_numpy(query_start_loc).int(),
        "positions": torch.from_numpy(positions),
        "rejected": torch.from_numpy(rejected).int() if fresh else None,
        "tokens": torch.arange(7 * longest, dtype=torch.int32).view(7, longest),
        "total": int(query_lens.sum()),
        "max_model_len": most,
        "kept": kept,
    }
    host_rows = torch.from_numpy(
        np.stack([np.cumsum(query_lens) - query_lens, query_lens, held, unpadded_lens])
    )
    found, *expected = reference.plan(host_rows, k=k, padded=padded, **given)
    assert expected[0][-1] == query_lens.sum() and found.stop.max() <= most
    expected.insert(0, inputs_triton.pack(found))
    out = [torch.full_like(x, -7, device=DEVICE) for x in expected]
    moved = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    names = ("rows", "queries", "lengths", "drafts")
    inputs_triton.plan(host_rows.to(DEVICE), **dict(zip(names, out, strict=True)), **moved)
    for name, one, other in zip(names, out, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other), name
