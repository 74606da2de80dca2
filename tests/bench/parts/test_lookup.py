"""The bench of lookups, on a short text."""

from __future__ import annotations

import json

import pytest

from bench.parts.lookup import main


def test_a_line_for_each_length_has_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lengths", "300", "3000", "--steps", "50"]) == 0
    short, long = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (short["tokens"], long["tokens"]) == (300, 3000)
    assert 0 < short["step_us"] < 1000 and 0 < long["build_ms"] < 1000
    assert long["matches"] > 0.3  # Python source repeats itself
    assert short["mib_of_128_requests"] < long["mib_of_128_requests"] < 128 * 28 * 3000 / 2**20
