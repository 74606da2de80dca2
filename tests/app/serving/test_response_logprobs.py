"""Which positions of an output belong to its content, where its parts look alike."""

from __future__ import annotations

from typing import Any, cast

import pytest

from app.llm.answer_logprobs import Alternatives
from app.serving.classes.response_logprobs import ContentLog

TOKENS = ["<think>", "in", " it", "</think>", "\n\n", "in", " it", "!"]


def step(text: str) -> Alternatives:
    alternatives = Alternatives(0, {})
    alternatives.text = text
    return alternatives


def add(log: ContentLog, *tokens: str) -> None:
    """Log tokens, each of which is its own entry."""
    log.add("".join(tokens), list(map(step, tokens)), cast("list[Any]", tokens))


def test_a_word_of_the_markup_is_no_content() -> None:
    """Catches: the position of `</think>` for the content "in", which is in its letters."""
    log, taken = ContentLog(), list[Any]()
    for index, token in enumerate(TOKENS):
        add(log, token)
        if index in (1, 2):
            log.skip(token)
        elif index > 4:
            log.add_content(token)
            taken += log.take()
    assert taken == TOKENS[5:]


def test_content_goes_on_within_a_token() -> None:
    """Catches: the position of a call's markup, whose beginning the content has."""
    log = ContentLog()
    add(log, "a", " <", "b", "<b>")
    log.add_content("a ")
    log.add_content("<b")
    assert log.take() == ["a", " <", "b"]


def test_content_after_reasoning_with_the_same_words() -> None:
    log = ContentLog()
    add(log, *TOKENS)
    log.skip("in it")
    log.add_content("in it!")
    assert log.take() == TOKENS[5:]
    assert log.take() == []


@pytest.mark.parametrize("content", ["Hi", " Hi"])
def test_content_may_begin_within_a_token(content: str) -> None:
    log = ContentLog()
    add(log, "<a>", " Hi", "</a>")
    log.add_content(content)
    assert log.take() == [" Hi"]


def test_a_position_that_comes_behind_its_text_is_not_lost() -> None:
    """As of a token that begins a stop string and goes on otherwise."""
    log = ContentLog()
    log.add("ab", [], [])
    log.add_content("ab")
    assert log.take() == []
    log.add("c", [step("abc")], cast("list[Any]", ["abc"]))
    assert log.take() == ["abc"]


def test_text_that_the_output_does_not_have_has_none() -> None:
    log = ContentLog()
    add(log, "a", "b")
    log.skip("x")
    log.add_content("y")
    assert log.take() == []
