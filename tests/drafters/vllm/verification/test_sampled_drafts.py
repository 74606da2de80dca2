"""Drafts are drawn with the noise of the target's tokens, and leave those tokens' law as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from drafters.vllm.verification.sampled_drafts import DraftSampling
from drafters.vllm.verification.seeded_sampling import SeededRequests, target_tokens

VOCABULARY, TRIALS = 40, 4000
CPU = torch.device("cpu")


def _sampling(temperatures: list[float], made: list[int], **filters: Any) -> DraftSampling:
    """One seeded request for each temperature that is not 0, at position 0 of its output."""
    places = {row: (row + 7, 0) for row, heat in enumerate(temperatures) if heat}
    metadata = SimpleNamespace(
        temperature=torch.tensor(temperatures), **{"top_k": None, "top_p": None, **filters}
    )
    seeded = SeededRequests(TopKTopPSampler(), places)
    return DraftSampling(seeded, metadata, np.array(made), VOCABULARY)


def _laws(difference: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a target, and of a head that is wrong by about `difference`."""
    generator = torch.Generator().manual_seed(3)
    target = 2 * torch.randn(VOCABULARY, generator=generator)
    return target, target + difference * torch.randn(VOCABULARY, generator=generator)


def _both(temperature: float, difference: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's tokens and the drafts of TRIALS requests: [trials] each."""
    target, head = _laws(difference)
    sampling = _sampling([temperature] * TRIALS, [0] * TRIALS)
    rows, offsets = np.arange(TRIALS), np.zeros(TRIALS, np.int64)
    logits = head.expand(TRIALS, -1)
    drafts = sampling.draw(logits.argmax(-1), logits, None, rows, offsets)
    scaled = target.expand(TRIALS, -1) / temperature
    tokens = target_tokens(
        scaled.clone(), [1] * TRIALS, SimpleNamespace(all_greedy=False, all_random=True),
        sampling.seeded,
    )  # fmt: skip
    return tokens, drafts


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_perfect_head_drafts_the_targets_own_token(temperature: float) -> None:
    tokens, drafts = _both(temperature, difference=0.0)
    assert torch.equal(tokens, drafts)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drafts_agree_more_often_than_the_most_probable_token(temperature: float) -> None:
    """The bound of any draft that does not see the noise is the largest probability."""
    tokens, drafts = _both(temperature, difference=0.7)
    target, head = (torch.softmax(law / temperature, -1) for law in _laws(0.7))
    overlap = float(torch.minimum(target, head).sum())
    agreement = float((tokens == drafts).float().mean())
    assert float(target.max()) + 0.05 < agreement < overlap + 0.03
    # The law of such a coupling: at least (1 - tv) / (1 + tv) (arXiv 2408.07978, theorem 3.1).
    assert agreement > overlap / (2.0 - overlap) - 0.03


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_targets_law_stays(temperature: float) -> None:
    tokens, _ = _both(temperature, difference=0.7)
    law = torch.softmax(_laws(0.0)[0] / temperature, -1)
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    few = law * TRIALS < 5
    expected = torch.cat([law[~few] * TRIALS, (law[few] * TRIALS).sum()[None]])
    found = torch.cat([counts[~few], counts[few].sum()[None]])
    statistic = float(((found - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_a_draft_has_the_noise_of_its_own_position() -> None:
    """Behind two tokens made, the draft at offset 1 predicts the token at position 3."""
    law = _laws(0.0)[0]
    sampling = _sampling([1.0], [2])
    draft = sampling.draw(law.argmax()[None], law[None], None, np.array([0]), np.array([1]))
    seed, _ = sampling.seeded.places[0]
    later = SeededRequests(sampling.seeded.sampler, {0: (seed, 3)})
    generators = later.bonus_generators(None, CPU)
    assert draft == later.sampler(law[None].clone(), generators, None, None)[0]


def test_greedy_requests_keep_the_most_probable_token() -> None:
    law = _laws(0.0)[0].expand(3, -1)
    sampling = _sampling([0.0, 1.0, 0.0], [0, 0, 0])
    likeliest = torch.tensor([11, 12, 13])
    drafts = sampling.draw(likeliest, law, None, np.arange(3), np.zeros(3, np.int64))
    assert drafts[0] == 11 and drafts[2] == 13
    assert drafts[1] != 12  # 12 is improbable there
    assert likeliest.tolist() == [11, 12, 13]


def test_top_k_and_top_p_shape_the_drafts() -> None:
    law = _laws(0.0)[0].expand(TRIALS, -1)
    likeliest = law.argmax(-1)
    rows, offsets = np.arange(TRIALS), np.zeros(TRIALS, np.int64)
    top = set(law[0].topk(3).indices.tolist())
    three = _sampling([1.0] * TRIALS, [0] * TRIALS, top_k=torch.full((TRIALS,), 3))
    assert set(three.draw(likeliest, law, None, rows, offsets).tolist()) == top
    little = _sampling([1.0] * TRIALS, [0] * TRIALS, top_p=torch.full((TRIALS,), 0.01))
    assert torch.equal(little.draw(likeliest, law, None, rows, offsets), likeliest)


def test_a_smaller_draft_vocabulary_draws_with_the_noise_of_the_targets_ids() -> None:
    """A head of every other token agrees with a target that has the same law over those."""
    ids = torch.arange(0, VOCABULARY, 2)
    law = _laws(0.0)[0]
    sampling = _sampling([1.0] * 200, [0] * 200)
    rows, offsets = np.arange(200), np.zeros(200, np.int64)
    small = law[ids].expand(200, -1)
    drafts = sampling.draw(ids[small.argmax(-1)], small, ids, rows, offsets)
    full = torch.full((VOCABULARY,), -torch.inf)
    full[ids] = law[ids]
    tokens = target_tokens(
        full.repeat(200, 1), [1] * 200, SimpleNamespace(all_greedy=False, all_random=True),
        sampling.seeded,
    )  # fmt: skip
    assert torch.equal(drafts, tokens)
