"""What a request is charged before anything is known about it."""

from __future__ import annotations

from typing import Any

import pytest

from app.admission.estimate import Estimate, estimate, estimate_tokenizing


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"prompt": "x"}, Estimate(110, 1)),
        ({"prompt": "x", "n": 3}, Estimate(130, 3)),
        ({"prompt": ["x", "y"], "n": 3}, Estimate(160, 6)),
        ({"prompt": [1, 2, 3]}, Estimate(110, 1)),
        ({"prompt": [[1], [2]]}, Estimate(120, 2)),
        ({}, Estimate(110, 1)),
        # Nothing has been checked yet: no shape may break it or make it negative.
        ({"n": "3", "prompt": {}}, Estimate(110, 1)),
        ({"n": -3}, Estimate(110, 1)),
        ({"n": None, "prompt": []}, Estimate(110, 1)),
    ],
)
def test_estimates(asked: dict[str, Any], expected: Estimate) -> None:
    assert estimate(asked, body_bytes=400, output_tokens=10) == expected


def test_the_tokenizer_alone_costs_its_text() -> None:
    assert estimate_tokenizing(400) == Estimate(100, 1)
