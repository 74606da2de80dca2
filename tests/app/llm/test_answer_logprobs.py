"""Which positions are handed out with which output (tests/app/serving/test_answer_logprobs.py has
what they add up to)."""

from __future__ import annotations

from types import SimpleNamespace

from app.llm.answer_logprobs import Alternatives, TextLog, chosen_tokens

END = 0


def position(token: int) -> Alternatives:
    return Alternatives(token, {token: SimpleNamespace(logprob=-1.0)})


def log(*texts: str) -> TextLog:
    made = TextLog({END})
    for text in texts:
        made.add_text(text)
    return made


def taken(made: TextLog, tokens: list[int], text: str, *, finished: bool = False) -> list[int]:
    return [step.chosen for step in made.take(map(position, tokens), text, finished=finished)]


def test_tokens_wait_for_their_text() -> None:
    made = log("a", "bc", "d")
    assert taken(made, [1, 2], "a") == [1]
    assert taken(made, [3], "bcd") == [2, 3]


def test_a_part_of_a_character_goes_with_what_completes_it() -> None:
    made = log("", "é")
    assert taken(made, [1], "") == [1]
    assert taken(made, [2, END], "é", finished=True) == [2], "the end is not detokenised"


def test_an_echoed_prompt_has_its_own_tokens() -> None:
    """vLLM puts the positions of the prompt in front, of which the first has none."""
    steps = [None, {8: SimpleNamespace()}, position(1), position(2)]
    assert chosen_tokens(steps, [7, 8, 1, END, 2]) == [7, 8, 1, 2]
