"""Answers of a target, generated once and replayed with any number of draft heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from drafters.train.data.responses import respond
from drafters.train.evaluation.position_noise import NoisyLogits, PositionNoise
from drafters.train.target import FrozenTarget


@dataclass(frozen=True, slots=True)
class Answers:
    """One answer for each prompt, greedy or sampled with noise of each position, and the tokens
    behind it that its last drafts predict."""

    prompt_lengths: list[int]
    written: list[int]  # tokens of each answer, its end token included
    texts: list[torch.Tensor]  # int64: prompt, answer, and `beyond` tokens more
    beyond: int  # the largest K that these answers can be replayed with
    noise: PositionNoise | None = None  # what they were sampled with; None: greedy


def write_answers(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    beyond: int,
    noise: PositionNoise | None = None,
) -> Answers:
    """Generate up to `steps` tokens after each prompt, ended by an end token.

    The last drafts of an answer reach up to `beyond` tokens behind it. So the target is made to
    continue behind its end tokens, and answers are cut at the first one: generating the rest in a
    second call would read every prompt and answer again.
    """
    endless = copy.copy(target)
    endless.end_tokens = []
    sampling = None if noise is None else partial(NoisyLogits, noise)
    written_on = dict(
        respond(endless, prompts, steps=steps + beyond, temperature=0.0, seed=0, processor=sampling)
    )
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
        noise=noise,
    )


def _answer_length(tokens: Sequence[int], end_tokens: Sequence[int]) -> int:
    """Number of tokens up to and including the first end token, or of all tokens."""
    ends = (place for place, token in enumerate(tokens, start=1) if token in end_tokens)
    return next(ends, len(tokens))
