"""What a request is charged before anything is known about it."""

from __future__ import annotations

from typing import Any

import pytest

from app.admission.estimate import Estimate, estimate, estimate_tokenizing


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"prompt": "x", "max_tokens": 10}, Estimate(110, 1)),
        ({"prompt": "x"}, Estimate(150, 1)),
        ({"prompt": "x", "max_tokens": 10, "n": 3}, Estimate(130, 3)),
        ({"prompt": ["x", "y"], "max_tokens": 10, "n": 3}, Estimate(160, 6)),
        ({"prompt": [1, 2, 3], "max_tokens": 10}, Estimate(110, 1)),
        ({"prompt": [[1], [2]], "max_tokens": 10}, Estimate(120, 2)),
        ({"messages": [], "max_completion_tokens": 7}, Estimate(107, 1)),
        ({"input": "x", "max_output_tokens": 7}, Estimate(107, 1)),
        # Nothing has been checked yet: no shape may break it or make it negative.
        ({"max_tokens": "10", "n": "3", "prompt": {}}, Estimate(150, 1)),
        ({"max_tokens": -10, "n": -3}, Estimate(100, 1)),
        ({"max_tokens": True, "n": None, "prompt": []}, Estimate(150, 1)),
    ],
)
def test_estimates(payload: dict[str, Any], expected: Estimate) -> None:
    assert estimate(payload, body_bytes=400, assumed_output=50) == expected


def test_the_tokenizer_alone_costs_its_text() -> None:
    assert estimate_tokenizing(400) == Estimate(100, 1)
