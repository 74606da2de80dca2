"""Streams with stop strings: nothing waits that cannot be the beginning of one."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.llm.stop_strings import Beginnings, hold_back_beginnings_only
from tests.app.fake_engine import TARGET

TEXTS = st.text("ab c", max_size=30)
STOPS = st.lists(st.text("ab c", min_size=1, max_size=6), min_size=1, max_size=3)


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(TARGET))


def detokenizer(stops: list[str], **params: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    request: Any = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(stop=stops, detokenize=True, **params),
    )
    return FastIncrementalDetokenizer(tokenizer(), request)


def pieces(made: Any, text: str) -> tuple[list[str], str | None]:
    """What a stream sends token by token, and the stop string that ended it."""
    sent, stop = [], None
    for token in tokenizer().encode(text, add_special_tokens=False):
        stop = made.update([token], False)
        sent.append(made.get_next_output_text(stop is not None, True))
        if stop is not None:
            return sent, stop
    return [*sent, made.get_next_output_text(True, True)], stop


def longest_beginning(text: str, stops: list[str]) -> int:
    """The longest end of the text that is the beginning of a stop string and shorter than it."""
    ends = [text[start:] for start in range(len(text))]
    may_become = [end for end in ends for stop in stops if stop != end and stop.startswith(end)]
    return max(map(len, may_become), default=0)


@given(pieces=st.lists(st.text("ab c", max_size=4), max_size=12), stops=STOPS)
def test_what_is_held_back_is_the_beginning_of_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    beginnings, text = Beginnings(stops), ""
    for piece in pieces:
        text += piece
        assert beginnings.held_back(text) == longest_beginning(text, stops)


class Counted(str):
    """A stop string that counts how often one of its characters is looked at."""

    __slots__ = ("looks",)
    looks: int

    def __getitem__(self, index: Any) -> str:
        self.looks = getattr(self, "looks", 0) + 1
        return super().__getitem__(index)


def counting(stop: Counted, text: str = "") -> Any:
    """A detokenizer with a stop string whose looks are counted from now on."""
    made: Any = SimpleNamespace(
        output_text=text,
        stop=[stop],
        stop_buffer_length=len(stop) - 1,
        get_next_output_text=lambda finished, delta: made.output_text,
    )
    hold_back_beginnings_only(made)
    stop.looks = 0
    return made


def test_a_long_beginning_is_not_compared_anew_at_each_token() -> None:
    """Each `a` might be the beginning: 1,023 comparisons for each output of each choice."""
    stop, tokens = Counted("a" + "b" * 1000), 4000
    made = counting(stop)
    for number in range(tokens):
        made.output_text += "a"
        made.get_next_output_text(number == tokens - 1, True)
        assert made.stop_buffer_length == 1
    assert 0 < stop.looks <= 4 * tokens


def test_nothing_is_compared_once_the_text_has_ended() -> None:
    stop = Counted("abc")
    counting(stop, "xyz" * 100).get_next_output_text(True, True)
    assert stop.looks == 0


@given(text=TEXTS, stops=STOPS)
def test_the_stream_is_the_one_that_vllm_sends_and_never_takes_back(
    text: str, stops: list[str]
) -> None:
    ours, theirs = detokenizer(stops), detokenizer(stops)
    hold_back_beginnings_only(ours)
    (sent, stop), (reference, expected) = pieces(ours, text), pieces(theirs, text)
    assert ("".join(sent), stop) == ("".join(reference), expected)


def test_words_come_whole_where_no_stop_string_can_match() -> None:
    text = "def area(width, height):\n    return width * height\n"
    made = detokenizer(["<|a long stop string that never comes|>"])
    hold_back_beginnings_only(made)
    tokens = tokenizer().encode(text, add_special_tokens=False)
    assert pieces(made, text)[0] == [*(tokenizer().decode([token]) for token in tokens), ""]


def test_a_stop_string_in_the_output_holds_nothing_back() -> None:
    made = detokenizer([" height"], include_stop_str_in_output=True)
    hold_back_beginnings_only(made)
    assert "get_next_output_text" not in vars(made)
