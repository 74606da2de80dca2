"""The figures that `aerie bench disturbance` computes from counters."""

from __future__ import annotations

import pytest

from bench.load.counters import Counters
from bench.served.disturbance import Look, drafting_share, drafts_after, quiet_stretches, rate

# 10 steps and 20 tokens a second; from second 5 on all steps draft, and make twice the tokens.
LOOKS = [
    Look(
        at_s=half / 2,
        tokens=20 * half / 2 + 20 * max(0.0, half / 2 - 5),
        steps=10 * half / 2,
        drafting=10 * max(0.0, half / 2 - 5),
    )
    for half in range(41)
]


def test_a_page_of_metrics_is_read() -> None:
    page = (
        "# TYPE aerie_steps_total counter\n"
        'aerie_steps_total{k="0"} 4\n'
        'aerie_steps_total{k="3"} 6\n'
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0"} 19\n'
    )
    assert Look.of(2.0, Counters.read(page)) == Look(2.0, 19.0, 10.0, 6.0)


def test_the_share_of_steps_that_draft() -> None:
    assert drafting_share(LOOKS, 0, 5) == 0.0
    assert drafting_share(LOOKS, 0, 10) == 0.5
    assert drafting_share(LOOKS, 5, 20) == 1.0
    assert drafting_share(LOOKS[:1], 0, 20) == 0.0


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 6.5), (1.0, 8.0), (0.0, 3.0), (1.1, None)])
def test_when_drafting_is_back(share: float, seconds: float | None) -> None:
    assert drafts_after(LOOKS, share) == seconds


def test_quiet_stretches_lie_around_the_disturbances() -> None:
    assert quiet_stretches([(60, 80), (140, 160)], 200) == [(10, 60), (80, 140), (160, 200)]


def test_tokens_per_second() -> None:
    assert rate(LOOKS, 0, 5) == 20.0
    assert rate(LOOKS, 5, 20) == 40.0
