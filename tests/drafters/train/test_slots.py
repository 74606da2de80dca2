"""COD sampling and the mask of parallel slots against their definitions."""

from __future__ import annotations

import torch

from drafters.train.cod import sample_chains
from drafters.train.mask import attention_mask
from drafters.train.slots import head_inputs, lay_out


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_cod_keeps_n_r_to_the_d() -> None:
    chains = sample_chains(10, 1009, _generator(0), k_train=8, retain=0.8)
    assert [len(chain) for chain in chains] == [round(1000 * 0.8**d) for d in range(1, 8)]


def test_cod_sets_are_nested_sorted_and_inside_the_text() -> None:
    kept = set(range(4, 40))
    for depth, chain in enumerate(sample_chains(4, 39, _generator(1)), start=1):
        anchors = chain.tolist()
        assert anchors == sorted(set(anchors))
        assert set(anchors) <= kept  # a slot without its predecessors was never served
        assert max(anchors) + depth <= 39
        kept = set(anchors)


def test_cod_is_a_function_of_its_seed() -> None:
    first, again, other = (sample_chains(0, 99, _generator(seed)) for seed in (7, 7, 8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_cod_of_a_text_shorter_than_the_chain() -> None:
    assert [len(chain) for chain in sample_chains(5, 6, _generator(2))] == [1, 0, 0, 0, 0, 0, 0]


def test_mask_equals_what_serving_sees() -> None:
    chains = sample_chains(3, 14, _generator(3), k_train=5)
    slots = lay_out(16, chains)
    elements = list(zip(slots.anchors.tolist(), slots.depths.tolist(), strict=True))
    assert len(elements) == 16 + sum(map(len, chains))
    mask = attention_mask(slots)
    for row, (anchor, depth) in enumerate(elements):
        # A draft from `anchor` feeds entries 0..anchor and then its slots 1..depth, causally.
        served = {(p, 0) for p in range(anchor + 1)} | {(anchor, d) for d in range(1, depth + 1)}
        seen = {elements[column] for column in mask[row].nonzero()[:, 0].tolist()}
        assert seen == served, (anchor, depth)


def test_inputs_shift_tokens_and_not_positions() -> None:
    slots = lay_out(3, [torch.tensor([1, 2]), torch.tensor([2])])
    tokens, fused = torch.tensor([[10, 11, 12, 13]]), torch.arange(6.0).view(1, 3, 2)
    ids, hidden, positions = head_inputs(slots, tokens, fused, torch.full((1, 2), -1.0), 99)
    assert ids.tolist() == [[11, 12, 13, 99, 99, 99]]
    assert positions.tolist() == [[0, 1, 2, 2, 3, 4]]
    assert slots.predicted.tolist() == [2, 3, 4, 4, 5, 6]
    assert torch.equal(hidden[0, :3], fused[0])
    assert (hidden[0, 3:] == -1).all()
