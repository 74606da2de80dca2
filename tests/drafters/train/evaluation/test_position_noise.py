"""Sampled answers have the target's law, and drafts the noise of the tokens that they predict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from drafters.train.evaluation.answers import write_answers
from drafters.train.evaluation.position_noise import NoisyDrafts, NoisyLogits, PositionNoise
from drafters.train.target import FrozenTarget

PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45]]
STEPS, BEYOND = 8, 3


def _head(vocabulary: int, ids: torch.Tensor | None = None) -> Any:
    """What NoisyDrafts sees of a head with these target ids."""
    size = vocabulary if ids is None else len(ids)
    return SimpleNamespace(
        output_matrix=torch.zeros(size, 1),
        to_target=lambda draft: draft if ids is None else ids[draft],
    )


def test_tokens_have_the_law_of_their_logits() -> None:
    law = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = PositionNoise(0.5, vocabulary=4, seed=1)
    sampling = NoisyLogits(noise, range(2000))
    logits = 0.5 * law.log().expand(2000, -1)
    for _ in range(2):  # the second place, independent of the first
        counts = sampling(torch.empty(0), logits).argmax(-1).bincount(minlength=4)
        statistic = float(((counts - 2000 * law) ** 2 / (2000 * law)).sum())
        assert statistic < 16.3  # three degrees of freedom, p = .001


def test_places_prompts_and_seeds_have_noise_of_their_own() -> None:
    seen = {
        tuple(PositionNoise(1.0, 3, seed).at(prompt, place).tolist())
        for seed in range(4) for prompt in range(4) for place in range(4)
    }  # fmt: skip
    assert len(seen) == 64


def test_a_head_with_the_targets_logits_drafts_the_sampled_text(target: FrozenTarget) -> None:
    noise = PositionNoise(1.0, target.shape.vocab_size, seed=5)
    answers = write_answers(target, PROMPTS, steps=STEPS, beyond=BEYOND, noise=noise)
    greedy = write_answers(target, PROMPTS, steps=STEPS, beyond=BEYOND)
    for number, (length, text) in enumerate(
        zip(answers.prompt_lengths, answers.texts, strict=True)
    ):
        with torch.no_grad():
            logits = target.model(text[None]).logits[0].float()
        last = len(text) - 1
        choose = NoisyDrafts(noise, _head(logits.shape[1]), prompt=number, length=length, last=last)
        places = torch.arange(length, last + 1)
        assert torch.equal(choose(logits[places - 1], places), text[length:])
        ids = text[length:].unique()
        few = NoisyDrafts(
            noise, _head(logits.shape[1], ids), prompt=number, length=length, last=last
        )
        assert torch.equal(ids[few(logits[places - 1][:, ids], places)], text[length:])
    assert any(
        not torch.equal(sampled[:9], likeliest[:9])
        for sampled, likeliest in zip(answers.texts, greedy.texts, strict=True)
    )
