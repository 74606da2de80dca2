"""Greedy answers of a target, written once and walked by any number of draft heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.train.data.responses import respond
from drafters.train.target import FrozenTarget


@dataclass(frozen=True, slots=True)
class Answers:
    """One greedy answer for each prompt, with the tokens that drafts at its end reach into."""

    prompt_lengths: list[int]
    written: list[int]  # tokens of each answer, its end token included
    texts: list[torch.Tensor]  # int64: prompt, answer, and `beyond` tokens more
    beyond: int  # the deepest K that these answers can be walked with


def write_answers(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], *, steps: int, beyond: int
) -> Answers:
    """Let the target write up to `steps` tokens after each prompt, to its end token.

    The last drafts of an answer reach up to `beyond` tokens behind it. So the target writes on as
    if its end tokens were any others, and answers are cut where the first one is: a second call for
    what lies behind them would read every prompt and answer again.
    """
    endless = copy.copy(target)
    endless.end_tokens = []
    written_on = dict(respond(endless, prompts, steps=steps + beyond, temperature=0.0, seed=0))
    lengths = [len(prompt) for prompt in prompts]
    texts = [written_on[index].tokens for index in range(len(prompts))]
    written = [
        _answer_length(text[length : length + steps].tolist(), target.end_tokens)
        for text, length in zip(texts, lengths, strict=True)
    ]
    ends = [length + count + beyond for length, count in zip(lengths, written, strict=True)]
    return Answers(
        prompt_lengths=lengths,
        written=written,
        texts=[text[:end] for text, end in zip(texts, ends, strict=True)],
        beyond=beyond,
    )


def _answer_length(tokens: Sequence[int], end_tokens: Sequence[int]) -> int:
    """Tokens up to and with the first end token, or all of them."""
    ends = (place for place, token in enumerate(tokens, start=1) if token in end_tokens)
    return next(ends, len(tokens))
