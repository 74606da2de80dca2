"""What a request is charged before anything is known about it."""

from __future__ import annotations

from app.admission.estimate import Estimate, estimate, estimate_tokenizing


def test_a_request_costs_its_text_and_what_each_sequence_may_have() -> None:
    assert estimate(body_bytes=400, output_tokens=10, sequences=6) == Estimate(160, 6)


def test_the_tokenizer_alone_costs_its_text() -> None:
    assert estimate_tokenizing(400) == Estimate(100, 1)
