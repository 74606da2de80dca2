"""COD samples the anchors that its definition demands."""

from __future__ import annotations

import torch

from drafters.train.optimisation.cod import sample_chains


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_cod_keeps_n_r_to_the_d() -> None:
    chains = sample_chains(10, 1009, _generator(0), k_train=8, retain=0.8)
    assert [len(chain) for chain in chains] == [round(1000 * 0.8**d) for d in range(1, 8)]


def test_full_depth_keeps_every_anchor_whose_draft_ends_in_the_text() -> None:
    chains = sample_chains(4, 39, _generator(0), k_train=8, retain=1.0)
    for depth, chain in enumerate(chains, start=1):
        assert chain.tolist() == list(range(4, 40 - depth))


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
    assert [len(chain) for chain in sample_chains(5, 2, _generator(2))] == [0] * 7
