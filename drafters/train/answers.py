"""Greedy answers of a target, written once and walked by any number of draft heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.train.respond import respond
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

    The last drafts of an answer reach up to `beyond` tokens behind it, so the target goes on
    writing there as if its end token were any other.
    """
    answers = dict(respond(target, prompts, steps=steps, temperature=0.0, seed=0))
    texts = [answers[index].tokens for index in range(len(prompts))]
    endless = copy.copy(target)
    endless.end_tokens = []
    continued = dict(
        respond(endless, [text.tolist() for text in texts], steps=beyond, temperature=0.0, seed=0)
    )
    lengths = [len(prompt) for prompt in prompts]
    return Answers(
        prompt_lengths=lengths,
        written=[len(text) - length for text, length in zip(texts, lengths, strict=True)],
        texts=[continued[index].tokens for index in range(len(prompts))],
        beyond=beyond,
    )
