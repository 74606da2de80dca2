"""`aerie bench interop`: two clients in turns, and the ratios of their figures."""

from __future__ import annotations

import pytest

from bench.served.interop import compare, table


def test_pairs_take_turns_and_are_compared_as_pairs() -> None:
    order: list[str] = []
    drift = iter(range(1, 100))

    def run(name: str, factor: float) -> dict[str, float]:
        order.append(name)
        return {"tokens/s": factor * 100.0}

    pairs = compare(lambda: run("ours", 1.02 * next(drift)), lambda: run("vllm", 1.0), 3)
    assert order == ["ours", "vllm", "vllm", "ours", "ours", "vllm"]
    same = [{"ours": {"tokens/s": 102.0 * n}, "vllm": {"tokens/s": 100.0 * n}} for n in (1, 2, 3)]
    (row,) = table(same)[1:]
    assert row == ["tokens/s", "204.00", "200.00", "1.020 ±0.000"]
    assert len(pairs) == 3


def test_a_client_that_fails_is_no_figure() -> None:
    def fail() -> dict[str, float]:
        raise RuntimeError("no server")

    with pytest.raises(RuntimeError, match="no server"):
        compare(fail, fail, 1)
