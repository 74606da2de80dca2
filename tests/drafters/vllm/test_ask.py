"""What a drafter is asked for."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from drafters.vllm.ask import Ask


def test_it_travels_with_the_step() -> None:
    scheduled = SimpleNamespace()
    assert Ask.of(scheduled) == Ask(0, 0.0, False)
    Ask(3, 0.05, True).attach(scheduled)
    assert Ask.of(pickle.loads(pickle.dumps(scheduled))) == Ask(3, 0.05, True)


@pytest.mark.parametrize(
    ("ask", "limit", "run", "asked"),
    [
        (Ask(3), 7, 4, 3),
        (Ask(3, grows=True), 7, 0, 3),
        (Ask(3, grows=True), 7, 2, 5),
        (Ask(3, grows=True), 7, 9, 7),
        (Ask(3, grows=True), 2, 9, 2),
        (Ask(0, grows=True), 7, 9, 0),
    ],
)
def test_a_run_asks_for_more_up_to_what_the_request_may_have(
    ask: Ask, limit: int, run: int, asked: int
) -> None:
    assert min(ask.k, limit) + ask.beyond(limit, run) == asked
    free = ask._replace(least_confidence=0.05)
    for offered in range(asked + 1):
        assert free.left_out(limit, run, offered) == asked - offered
        assert ask.left_out(limit, run, offered) == 0
