"""Rows with NaN or +infinity are found, whatever masks a row has, and counted for their request;
rows of finite numbers are not, even if their sum leaves the data type's range."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.vllm.v1.runner import V1DraftingRunner
from drafters.vllm.verification.finite import broken_rows, by_request
from drafters.vllm.worker import mixed

VALUES = st.sampled_from([0.0, -3.5, 60000.0, -60000.0, float("-inf"), float("inf"), float("nan")])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    rows=st.lists(st.lists(VALUES, min_size=5, max_size=5), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_with_nan_or_infinity_are_found(rows: list[list[float]], dtype: torch.dtype) -> None:
    values = np.array(rows)
    expected = (np.isnan(values) | np.isposinf(values)).any(-1)
    assert broken_rows(torch.tensor(rows, dtype=dtype)).tolist() == expected.tolist()


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=5))
def test_rows_are_counted_for_their_request(requests: list[list[bool]]) -> None:
    rows = torch.tensor([broken for request in requests for broken in request])
    ends = torch.tensor([len(request) for request in requests]).cumsum(0)
    counts = by_request(rows, ends)
    assert counts.tolist() == [sum(request) for request in requests]


class Base:
    """What the mixin sees of vLLM's runner."""

    def __init__(self) -> None:
        self.use_async_scheduling = False
        self.own_drafter = None
        self.input_batch = SimpleNamespace(
            req_ids=["a", "b", "c"],
            generators={},
            sampling_metadata=SimpleNamespace(all_greedy=True),
        )
        self.rejection_sampler = SimpleNamespace(synthetic_mode=True)

    def _sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        logits.fill_(0.0)  # vLLM changes logits in place
        return "output"

    def _bookkeeping_sync(self, *args: Any) -> Any:
        return {"a": 9}, None, "logprobs", "tokens", {}, [], {}, []


def runner() -> Any:
    made = mixed(type("Mixin", (V1DraftingRunner,), {"__init__": Base.__init__}), Base)
    return made()


@pytest.mark.parametrize(
    ("drafts", "broken", "expected"),
    [
        (None, 1, {"b": 1}),
        # Row 3 is the second one of request b, not the only one of a fourth request.
        ([1, 2, 0], 3, {"b": 1}),
        ([1, 2, 0], 5, {"c": 1}),
    ],
)
def test_the_runner_tells_of_each_request(
    drafts: list[int] | None, broken: int, expected: dict[str, int]
) -> None:
    made = runner()
    logits = torch.zeros(3 if drafts is None else 6, 4)
    logits[broken, 2] = torch.nan
    metadata = None
    if drafts is not None:
        ends = (torch.tensor(drafts) + 1).cumsum(0)
        metadata = SimpleNamespace(num_draft_tokens=drafts, cu_num_sampled_tokens=ends)
    made._sample(logits, metadata)
    counts, on_device, *rest = made._bookkeeping_sync()
    assert (counts, on_device) == (expected, None)
    assert rest == ["logprobs", "tokens", {}, [], {}, []]
    assert made._bookkeeping_sync()[0] == {}, "of a step that sampled nothing"


def test_asynchronous_counts_stay_on_the_device() -> None:
    made = runner()
    made.use_async_scheduling = True
    logits = torch.zeros(3, 4)
    logits[2, 0] = torch.inf
    made._sample(logits, None)
    counts, on_device, *_ = made._bookkeeping_sync()
    assert counts == {}
    assert on_device.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("rows", "shared", "expected"),
    [([0, 1, 0, 1, 1, 0], False, [0, 1, 2]), ([0, 1, 2], True, [0, 1, 2]), (None, False, None)],
)
def test_the_v2_runner_tells_of_each_request(
    rows: list[int] | None, shared: bool, expected: list[int] | None
) -> None:
    """Ranks that share the sampling have added a request's rows already, and a sampler of another
    kind has no counts."""
    pytest.importorskip("triton", reason="the V2 runner needs Triton")
    from drafters.vllm.v2.runner import V2DraftingRunner

    class V2Base:
        batch_sharder = object() if shared else None
        device = torch.device("cpu")

        def sample(self, *_: Any) -> Any:
            counts = None if rows is None else torch.tensor(rows, dtype=torch.int32)
            return SimpleNamespace(num_nans=counts), "made", "rejected"

    mixin = type("Mixin", (V2DraftingRunner,), {"__init__": V2Base.__init__})
    batch = SimpleNamespace(cu_num_logits=torch.tensor([0, 1, 3, 6]))
    output, *others = mixed(mixin, V2Base)().sample(None, batch, None)
    assert (None if output.num_nans is None else output.num_nans.tolist()) == expected
    assert others == ["made", "rejected"]
