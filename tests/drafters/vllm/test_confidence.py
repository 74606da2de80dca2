"""Which drafts are offered."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafters.vllm.confidence import confident

chances = st.floats(0.01, 1.0)


@given(st.lists(st.lists(chances, max_size=6), min_size=1, max_size=5), st.floats(0.001, 0.9))
def test_drafts_are_offered_while_all_together_are_likely(
    rows: list[list[float]], least: float
) -> None:
    logs = np.log(np.array([chance for row in rows for chance in row], np.float32))
    wants = np.array([len(row) for row in rows])
    got = confident(logs, wants, least)
    for row, count in zip(rows, got.tolist(), strict=True):
        assert min(1, len(row)) <= count <= len(row)
        # Rounding decides where the product is the limit itself.
        if count > 1:
            assert math.prod(row[:count]) > 0.999 * least
        if count < len(row):
            assert math.prod(row[: count + 1]) < 1.001 * least


def test_a_drafter_that_is_sure_offers_all() -> None:
    assert confident(np.zeros(7, np.float32), np.array([3, 0, 4]), 0.5).tolist() == [3, 0, 4]


def test_doubt_of_one_request_is_not_another_s() -> None:
    logs = np.log(np.array([0.01, 0.9, 0.9, 0.9], np.float32))
    assert confident(logs, np.array([2, 2]), 0.05).tolist() == [1, 2]
