"""Answers for the replay of several heads: where they end, and the tokens behind their end."""

from __future__ import annotations

import copy

from drafters.train.data.responses import respond
from drafters.train.evaluation.answers import write_answers
from drafters.train.target import FrozenTarget

PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45]]
STEPS, BEYOND = 8, 3


def test_answers_end_where_the_target_ends_them_and_go_on_behind(target: FrozenTarget) -> None:
    endless = copy.copy(target)
    endless.end_tokens = []
    whole = dict(respond(endless, PROMPTS, steps=STEPS + BEYOND, temperature=0.0, seed=0))
    # A token that one answer comes to in its middle.
    target.end_tokens = [int(whole[0].tokens[len(PROMPTS[0]) + 3])]
    ended = dict(respond(target, PROMPTS, steps=STEPS, temperature=0.0, seed=0))
    answers = write_answers(target, PROMPTS, steps=STEPS, beyond=BEYOND)
    assert answers.prompt_lengths == [3, 6]
    assert answers.written[0] <= 4
    for index, prompt in enumerate(PROMPTS):
        answer = ended[index].tokens.tolist()
        assert answers.written[index] == len(answer) - len(prompt)
        text = answers.texts[index].tolist()
        assert len(text) == len(answer) + BEYOND
        assert text == whole[index].tokens.tolist()[: len(text)]
        assert text[: len(answer)] == answer
