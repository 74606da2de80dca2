"""Drafts drawn on vLLM's V2 model runner, and their verification, beside vLLM's own sampler; on a
GPU or in Triton's interpreter.

pytest does not collect this file: test_draft_sampling.py runs it in a process of its own, and
`make gpu-check` on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from drafters.vllm.v2.draft_sampling import DeviceDraftSampling
from drafters.vllm.v2.rejection_sampler import match

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 40
FEW = 24  # requests: the interpreter takes 10 ms and more for each program of a kernel
TRIALS = 20_000  # requests of tests that run no kernel


class States:
    """vLLM's SamplingStates of requests in slots, without pinned memory."""

    def __init__(self, temperatures: list[float], top_k: int, top_p: float, min_p: float) -> None:
        slots = self.max_num_reqs = len(temperatures)
        self.temperature = self._entry(torch.tensor(temperatures, dtype=torch.float32))
        self.seeds = self._entry(torch.arange(slots) * 7919 - 5)
        self.top_k = self._entry(torch.full((slots,), top_k, dtype=torch.int32))
        self.top_p = self._entry(torch.full((slots,), top_p))
        self.min_p = self._entry(torch.full((slots,), min_p))

    @staticmethod
    def _entry(values: torch.Tensor) -> Any:
        return SimpleNamespace(np=values.numpy(), gpu=values.to(DEVICE))


def sampling(
    temperatures: list[float], top_k: int = VOCABULARY, top_p: float = 1.0, min_p: float = 0.0
) -> DeviceDraftSampling:
    """One request in each slot, all in the batch."""
    states = States(temperatures, top_k, top_p, min_p)
    made = DeviceDraftSampling(states, DEVICE, use_fp64=False)
    made.refresh(np.arange(states.max_num_reqs))
    return made


def laws(difference: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a target, and of a head that is wrong by about `difference`."""
    generator = torch.Generator().manual_seed(3)
    target = 2 * torch.randn(VOCABULARY, generator=generator)
    wrong = target + difference * torch.randn(VOCABULARY, generator=generator)
    return target.to(DEVICE), wrong.to(DEVICE)


def noise(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """vLLM's noise of V2 (v1/worker/gpu/sample/gumbel.py): MurmurHash3 of a token's seed, position
    and id, as Gumbel noise. Shapes are broadcast."""
    mask = 2**32 - 1

    def rotated(value: torch.Tensor, by: int) -> torch.Tensor:
        return ((value << by) | (value >> (32 - by))) & mask

    state = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for key in (seeds & mask, (seeds >> 32) & mask, positions & mask, ids):
        mixed = rotated(key * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
        state = (rotated(state ^ mixed, 13) * 5 + 0xE6546B64) & mask
    state = state ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B & mask
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & mask
    uniform = ((state ^ (state >> 16)).double() + 0.5) / 2**32
    return -(-(-uniform).log1p()).log()


def targets(
    made: DeviceDraftSampling, scaled: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """What vLLM samples from `scaled`, logits / T as its options leave them: one row a request."""
    rows = torch.arange(len(scaled), device=DEVICE)
    return gumbel_sample(
        scaled.clone(), rows, made.temperature, made.seeds, positions,
        apply_temperature=False, is_drafting=False,
    )  # fmt: skip


def drawn(
    made: DeviceDraftSampling, logits: torch.Tensor, positions: torch.Tensor, ids: Any = None
) -> torch.Tensor:
    """One draft for each request, where the greedy one is -9."""
    tokens = torch.full((len(logits),), -9, device=DEVICE)
    made.draw(tokens, logits, ids, torch.arange(len(logits), device=DEVICE), positions)
    return tokens


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_a_perfect_head_drafts_the_targets_own_token(temperature: float) -> None:
    """Catches: noise of the drafts' own, or of another position, seed or token."""
    made = sampling([temperature] * FEW)
    law = laws(0.0)[0].expand(FEW, -1)
    positions = torch.arange(FEW, device=DEVICE) * 3
    assert torch.equal(drawn(made, law, positions), targets(made, law / temperature, positions))


@pytest.mark.parametrize(("top_k", "top_p"), [(9001, 1.0), (2000, 0.9)])
def test_several_blocks_of_columns_are_one_law(top_k: int, top_p: float) -> None:
    """Catches: the best of a block instead of that of all, noise by the place in a block, and
    bounds of one block's tokens."""
    logits = 3 * torch.randn(FEW, 9001, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    made = sampling([0.8] * FEW, top_k, top_p)
    positions, every = torch.full((FEW,), 5, device=DEVICE), torch.ones(FEW, device=DEVICE)
    scaled = apply_top_k_top_p_pytorch(logits / 0.8, (every * top_k).int(), every * top_p)
    tokens = drawn(made, logits, positions)
    assert torch.equal(tokens, targets(made, scaled, positions))
    assert len((tokens // 4096).unique()) > 1


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (1, 1.0, 0.0), (VOCABULARY, 0.8, 0.0), (VOCABULARY, 1.0, 0.2), (9, 0.7, 0.02)],
)
def test_options_shape_drafts_as_they_shape_tokens(top_k: int, top_p: float, min_p: float) -> None:
    """A perfect head drafts the target's token under top-k, top-p and min-p too."""
    made = sampling([0.9] * FEW, top_k, top_p, min_p)
    law = laws(0.0)[0].expand(FEW, -1)
    scaled = law / 0.9
    bound = scaled.amax(1, keepdim=True) + np.log(min_p or 1e-30)
    scaled = scaled.masked_fill(scaled < bound, -torch.inf)
    every = torch.ones(FEW, device=DEVICE)
    scaled = apply_top_k_top_p_pytorch(
        scaled.clone(), (every * top_k).int() if top_k < VOCABULARY else None,
        every * top_p if top_p < 1.0 else None,
    )  # fmt: skip
    positions = torch.arange(FEW, device=DEVICE)
    assert torch.equal(drawn(made, law, positions), targets(made, scaled, positions))
    assert not torch.equal(targets(made, law / 0.9, positions), targets(made, scaled, positions))


def test_greedy_requests_and_padding_keep_their_tokens() -> None:
    law = laws(0.0)[0].expand(4, -1)
    made = sampling([0.0, 1.0, 0.0, 1.0])
    tokens = torch.full((4,), -9, device=DEVICE)
    slots = torch.tensor([0, 1, 2, -1], device=DEVICE)
    made.draw(tokens, law, None, slots, torch.zeros(4, dtype=torch.int64, device=DEVICE))
    assert tokens[[0, 2, 3]].tolist() == [-9] * 3 and int(tokens[1]) >= 0


def test_a_requests_drafts_have_positions_in_succession() -> None:
    """And a slot's seed and temperature belong to the request in it, wherever it is in a batch."""
    law, k = laws(0.0)[0], 3
    made = sampling([0.9, 0.0, 1.3])
    tokens = torch.full((2 * k,), -9, device=DEVICE)
    slots = torch.tensor([2, 0], device=DEVICE)
    made.draw(tokens, law.expand(2 * k, -1), None, slots, torch.tensor([10, 20], device=DEVICE))
    for request, slot in enumerate(slots.tolist()):
        for offset in range(k):
            at = torch.full((3,), (10, 20)[request] + offset, device=DEVICE)
            own = targets(made, law / made.temperature[:, None].clamp(min=0.1), at)[slot]
            assert tokens[request * k + offset] == own


def test_a_smaller_draft_vocabulary_has_the_noise_of_the_targets_ids() -> None:
    """A head of every other token agrees with a target that has the same law over those; and so do
    candidates that differ from draft to draft."""
    ids = torch.arange(0, VOCABULARY, 2, device=DEVICE)
    full = torch.full((VOCABULARY,), -torch.inf, device=DEVICE)
    full[ids] = laws(0.0)[0][ids]
    made, positions = sampling([1.0] * FEW), torch.arange(FEW, device=DEVICE)
    expected = targets(made, full.expand(FEW, -1), positions)
    assert torch.equal(drawn(made, full[ids].expand(FEW, -1), positions, ids), expected)
    order = torch.stack([ids[torch.randperm(len(ids), device=DEVICE)] for _ in range(FEW)])
    assert torch.equal(drawn(made, full[order], positions, order), expected)


def test_options_are_taken_over_when_a_batch_needs_them() -> None:
    """Catches: a slot's former temperature for a greedy request that came after."""
    states = States([0.0, 0.0], VOCABULARY, 1.0, 0.0)
    made = DeviceDraftSampling(states, DEVICE, use_fp64=False)
    for temperature in (0.7, 0.0):
        states.temperature.np[1] = temperature
        states.temperature.gpu[1] = temperature
        made.refresh(np.array([1]))
        assert float(made.temperature[1]) == pytest.approx(temperature)


def test_what_ended_requests_left_in_other_slots_costs_greedy_batches_nothing() -> None:
    """Catches: options that are copied in every greedy step, as vLLM's warm-up leaves T = 0.9 in
    all slots."""
    states = States([0.9, 0.0], VOCABULARY, 1.0, 0.0)
    made = DeviceDraftSampling(states, DEVICE, use_fp64=False)
    made.refresh(np.array([0]))
    made.refresh(np.array([1]))
    assert not made.temperature.any()
    states.seeds.gpu[:] = 77
    made.refresh(np.array([1]))
    assert not (made.seeds == 77).any()


def test_the_noise_of_these_tests_is_vllms() -> None:
    made, positions = sampling([1.0] * FEW), torch.arange(FEW, device=DEVICE) * 1000
    law = laws(0.0)[0].expand(FEW, -1)
    ids = torch.arange(VOCABULARY, device=DEVICE)
    noisy = law + noise(made.seeds[:, None], positions[:, None], ids)
    assert torch.equal(noisy.argmax(-1), targets(made, law, positions))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_targets_law_stays_and_more_drafts_are_accepted(temperature: float) -> None:
    """Two drafts a request, verified: the first token has the target's law, and so has the second
    where the first was accepted, and the third where both were. vLLM's test by a ratio of
    probabilities would fail this, as drafts know the noise."""
    target, head = (law.double() / temperature for law in laws(0.7))
    seeds = 7919 * torch.arange(TRIALS, device=DEVICE)[:, None, None] - 5
    positions = 17 + torch.arange(3, device=DEVICE)[:, None]
    gumbel = noise(seeds, positions, torch.arange(VOCABULARY, device=DEVICE))
    tokens = (target + gumbel).argmax(-1)  # [trials, 3]
    drafts = (head + gumbel).argmax(-1)[:, :2]
    newest = torch.zeros(TRIALS, 1, dtype=torch.int64, device=DEVICE)
    read = torch.cat([newest, drafts], 1)
    starts = 3 * torch.arange(TRIALS + 1, device=DEVICE)
    own, counts = match(tokens.view(-1), read.view(-1), starts, 2)
    law, wrong = torch.softmax(target, -1).cpu(), torch.softmax(head, -1).cpu()
    for seen in (own[:, 0], own[counts > 1, 1], own[counts > 2, 2]):
        assert deviation(seen.cpu(), law) < 4
    accepted = float((counts > 1).float().mean())
    overlap = float(torch.minimum(law, wrong).sum())
    assert float(law[int(head.argmax())]) + 0.05 < accepted < overlap + 0.03
    # Theorem 3.1 of arXiv 2408.07978: at least (1 - tv) / (1 + tv).
    assert accepted > overlap / (2.0 - overlap) - 0.03


def deviation(seen: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of tokens against their law, less its freedom, in standard deviations. Tokens that
    are expected less than five times are taken together."""
    counts = torch.bincount(seen, minlength=len(law)).double()
    few = law * len(seen) < 5
    expected, found = law[~few] * len(seen), counts[~few]
    if few.any():
        expected = torch.cat([expected, (law[few] * len(seen)).sum()[None]])
        found = torch.cat([found, counts[few].sum()[None]])
    freedom = len(expected) - 1
    return float((((found - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def test_tokens_count_up_to_the_first_that_differs() -> None:
    """Requests with two, no and three drafts; -1 marks one that must be rejected."""
    starts = torch.tensor([0, 3, 4, 8], device=DEVICE)
    read = torch.tensor([1, 5, 6, 2, 3, 7, -1, 9], device=DEVICE)
    tokens = torch.tensor([5, 8, 4, 11, 7, 6, 9, 12], device=DEVICE)
    own, counts = match(tokens, read, starts, 3)
    assert counts.tolist() == [2, 1, 2] and counts.dtype == torch.int32
    assert own[0, :2].tolist() == [5, 8] and int(own[1, 0]) == 11 and own[2, :2].tolist() == [7, 6]
    read[2], tokens[4:] = 8, torch.tensor([7, 5, 9, 12])
    own, counts = match(tokens, read, starts, 3)
    assert counts.tolist() == [3, 1, 2] and own[0, :3].tolist() == [5, 8, 4]
