"""Drafts are accepted by noise that depends on seed and position alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from drafters.vllm.verification.seeded_sampling import (
    SeededRequests,
    accept,
    match,
    seed_at,
    seed_of_id,
)

VOCABULARY = 50


@st.composite
def verified(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Drafts, the target's tokens in their places, bonus tokens: few kinds, so that they match."""
    token = st.integers(0, 2)
    drafts = draw(st.lists(st.lists(token, max_size=5), min_size=1, max_size=6))
    if not any(drafts):
        drafts[0] = [1]
    tokens = [[draw(token) for _ in request] for request in drafts]
    return drafts, tokens, [draw(token) for _ in drafts]


@given(verified())
def test_a_draft_is_kept_up_to_the_first_wrong_one(
    case: tuple[list[list[int]], list[list[int]], list[int]],
) -> None:
    drafts, tokens, bonus = case
    longest = max(map(len, drafts))
    ends = torch.tensor([len(d) for d in drafts]).cumsum(0).int()
    got = match(
        torch.tensor(list(chain(*tokens))), torch.tensor(list(chain(*drafts))),
        torch.tensor(bonus, dtype=torch.int32)[:, None], ends, longest,
    )  # fmt: skip
    expected = []
    for draft, token, last in zip(drafts, tokens, bonus, strict=True):
        row = []
        for d, t in zip(draft, token, strict=True):
            row.append(t)
            if d != t:
                break
        else:
            row.append(last)
        expected.append(row + [-1] * (longest + 1 - len(row)))
    assert got.tolist() == expected
    assert got.dtype == torch.int32


def test_neighbouring_seeds_and_positions_share_no_noise() -> None:
    """A CPU generator takes the lower 32 bits only."""
    low = {seed_at(seed, place) & 0xFFFFFFFF for seed in range(300) for place in range(300)}
    assert len(low) > 89_990  # 90,000 with one collision expected
    assert seed_at(7, 3, 2) == seed_at(7, 5)


def test_requests_without_a_seed_have_different_ones() -> None:
    assert len({seed_of_id(f"chatcmpl-{number}") for number in range(1000)}) == 1000
    assert seed_of_id("chatcmpl-1") == seed_of_id("chatcmpl-1")


CPU = torch.device("cpu")


def _runner(seeds: list[int | None], lengths: list[int], greedy: Sequence[str] = ()) -> Any:
    names = [str(row) for row in range(len(seeds))]
    return SimpleNamespace(
        sampler=SimpleNamespace(topk_topp_sampler=TopKTopPSampler()),
        input_batch=SimpleNamespace(
            req_ids=names,
            random_reqs={name for name in names if name not in greedy},
        ),
        requests={
            name: SimpleNamespace(
                sampling_params=SimpleNamespace(seed=seed), output_token_ids=[0] * length
            )
            for name, seed, length in zip(names, seeds, lengths, strict=True)
        },
    )


def _logits(position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(position)
    return torch.randn(VOCABULARY, generator=generator) * 2


def test_a_seeded_text_does_not_depend_on_the_drafts() -> None:
    """Token by token, and four at a time beside a request without a seed: the same tokens."""
    one_by_one = []
    for position in range(8):
        seeded = SeededRequests.in_batch_of(_runner([11], [position]), own_seeds=False)
        generators = seeded.bonus_generators(None, CPU)
        one_by_one.append(int(seeded.sampler(_logits(position)[None], generators, None, None)[0]))

    seeded = SeededRequests.in_batch_of(_runner([None, 11], [5, 2]), own_seeds=False)
    assert list(seeded.places) == [1]
    rows = [_logits(0)] * 3 + [_logits(2 + offset) for offset in range(4)]
    at_once = seeded.sample(torch.stack(rows), [3, 4])
    assert at_once[3:].tolist() == one_by_one[2:6]
    generators = seeded.bonus_generators([3, 4], CPU)
    behind = seeded.sampler(torch.stack([_logits(0), _logits(6)]), generators, None, None)[0]
    assert int(behind[1]) == one_by_one[6]


def test_other_seeds_give_other_texts() -> None:
    texts = set()
    for seed in range(20):
        seeded = SeededRequests.in_batch_of(_runner([seed], [0]), own_seeds=False)
        rows = torch.stack([_logits(place) for place in range(6)])
        texts.add(tuple(seeded.sample(rows, [6]).tolist()))
    assert len(texts) == 20


def test_own_seeds_are_for_requests_that_are_not_greedy() -> None:
    runner = _runner([None, None, 5], [1, 2, 3], greedy=["0"])
    seeded = SeededRequests.in_batch_of(runner, own_seeds=True)
    assert seeded.places == {1: (seed_of_id("1"), 2), 2: (5, 3)}


def test_greedy_requests_take_the_likeliest_beside_sampled_ones() -> None:
    rows = torch.stack([_logits(place) for place in range(4)])
    likeliest = rows.argmax(-1)
    seeded = SeededRequests.in_batch_of(_runner([None, 3], [0, 0], greedy=["0"]), own_seeds=True)
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=False,
        temperature=torch.tensor([0.0, 1.0]),
        seeded_requests=seeded,
    )
    got = accept(
        likeliest.clone(), [2, 2], 2, torch.tensor([2, 4]), None, rows,
        torch.tensor([[49], [49]], dtype=torch.int32), metadata,
    )  # fmt: skip
    assert got[0].tolist() == [*likeliest[:2].tolist(), 49]
    sampled = seeded.sample(torch.stack([_logits(place) for place in range(4)]), [2, 2])[2:]
    assert got[1, 0] == sampled[0]
