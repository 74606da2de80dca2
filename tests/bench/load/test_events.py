"""From records to outcomes and figures: counts of tokens, and arithmetic of times."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.load.client import Record
from bench.load.events import Outcome, events, outcome
from bench.load.figures import figures, quantile, steady


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(words: str) -> bytes:
    return event(choices=[{"index": 0, "text": words}])


USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 9})
DONE = b"data: [DONE]\n\n"


def record(*reads: tuple[float, bytes], sent: float = 1.0) -> Record:
    return Record(sent, 200, list(reads))


def test_times_are_those_of_the_reads_and_tokens_those_of_usage() -> None:
    found = outcome(
        record(
            (2.0, text("a")), (2.5, text("b c") + text("d")), (3.0, text("e")), (9.0, USAGE + DONE)
        )
    )
    assert not found.failure
    assert (found.prompt_tokens, found.tokens) == (5, 9)  # four chunks, nine tokens
    assert found.ttft == 1.0
    assert found.e2e == 2.0  # usage comes later, and is no answer
    assert found.tpot == pytest.approx(1.0 / 8)
    assert found.gaps == [0.5, 0.0, 0.5]


def test_an_event_split_over_reads_came_with_its_last_byte() -> None:
    data = text("a")
    found = outcome(record((2.0, data[:7]), (2.5, data[7:-1]), (3.0, data[-1:] + USAGE + DONE)))
    assert found.chunks == (3.0,)


def test_line_ends_and_comments_of_other_servers() -> None:
    reads = [
        (1.0, b': keep-alive\r\n\r\ndata: {"a": 1}\r\n\r\n'),
        (2.0, b"event: x\ndata:[DONE]\n\n"),
    ]
    assert list(events(reads)) == [(1.0, b'{"a": 1}'), (2.0, b"[DONE]")]


def test_a_chats_first_event_has_a_role_and_no_text() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    word = event(choices=[{"index": 0, "delta": {"content": "hi"}}])
    found = outcome(record((2.0, role), (4.0, word), (5.0, USAGE + DONE)))
    assert found.ttft == 3.0
    assert (found.chunks, found.events) == ((4.0,), (2.0, 4.0))


def test_an_end_without_text_is_an_event_and_no_chunk() -> None:
    end = event(choices=[{"index": 0, "text": "", "finish_reason": "stop"}])
    both = event(choices=[{"index": 0, "text": "b"}, {"index": 1, "text": "c"}])
    found = outcome(record((2.0, text("a")), (4.0, both), (4.5, end), (5.0, USAGE + DONE)))
    assert found.gaps == [2.0, 0.0]  # two answers' chunks in one event
    assert found.event_gaps == [2.0, 0.5]
    assert figures([found])["event_gap_ms"]["mean"] == 1250.0


@pytest.mark.parametrize(
    ("reads", "why"),
    [
        ([(2.0, text("a") + USAGE)], "[DONE]"),
        ([(2.0, text("a") + DONE)], "no usage"),
        ([(2.0, event(error={"message": "engine died"}))], "engine died"),
        ([(2.0, b"data: {oops\n\n")], "no JSON"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_failure(reads: list[Any], why: str) -> None:
    assert why in outcome(record(*reads)).failure


def made(sent: float, first: float, last: float, tokens: int, failure: str = "") -> Outcome:
    return Outcome(sent, first, last, (first, last), (first, last), 10, tokens, failure)


def test_figures_of_a_run() -> None:
    found = figures([made(0.0, 1.0, 3.0, 5), made(1.0, 1.5, 5.0, 15)])
    assert found["seconds"] == 5.0
    assert found["tokens_per_second"] == 4.0
    assert found["tpot_ms"]["mean"] == pytest.approx(1e3 * (0.5 + 0.25) / 2)
    assert found["user_tokens_per_second"] == 3.0  # half-way between 2 and 4
    assert found["ttft_ms"]["p50"] == 750.0
    assert found["e2e_ms"]["p50"] == 3500.0
    assert (found["requests"], found["failed"], found["chunks"]) == (2, 0, 4)


def test_steady_figures_leave_out_start_and_tail() -> None:
    first = Outcome(0.0, 1.0, 3.0, (1.0, 2.0, 3.0), (), 10, 6)
    second = Outcome(0.0, 1.5, 5.0, (1.5, 4.0, 5.0), (), 10, 9)
    third = Outcome(3.0, 3.5, 9.0, (3.5, 6.0, 9.0), (), 10, 30)
    # Two users: both have a token at 1.5; from 5.0 on only the third request runs.
    found = steady([first, second, third], users=2)
    assert found["steady_seconds"] == 3.5
    assert found["steady_tokens_per_second"] == pytest.approx((4 + 6 + 10) / 3.5, abs=0.01)
    assert steady([first, second], users=1)["steady_seconds"] == 4.0  # from its first token on
    assert steady([first], users=2) == {}
    assert steady([first, made(0.0, 0.0, 0.0, 0, "HTTP 500: x")], users=1) == {}
    assert steady([made(0.0, 1.0, 2.0, 4), made(0.0, 3.0, 4.0, 4)], users=2) == {}  # never both


def test_failed_requests_count_as_failed_and_for_nothing_else() -> None:
    found = figures([made(0.0, 1.0, 2.0, 8), made(0.0, 0.0, 0.0, 0, "HTTP 500: x")])
    assert found["failed"] == 1
    assert found["failures"] == ["HTTP 500: x"]
    assert found["tokens_per_second"] == 4.0
    assert "tokens_per_second" not in figures([made(0.0, 0.0, 0.0, 0, "HTTP 500: x")])


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([7.0], 0.99) == 7.0
