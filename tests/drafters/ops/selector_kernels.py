"""The kernel of a path selector's walk beside `PathSelector.walk`, on a GPU or in Triton's
interpreter.

pytest does not collect this file, as it does not collect kernels.py: test_kernels.py runs it.
"""

from __future__ import annotations

import pytest
import torch

from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.selector import PathSelector, SelectorTables, top_candidates
from drafters.ops import selector_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, HIDDEN = 50, 24


def case(
    rank: int, count: int, dtype: torch.dtype, requests: int, positions: int
) -> tuple[PathSelector, SelectorTables, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random selector, its tables, states, logits and first tokens."""
    torch.manual_seed(rank + count + requests)
    config = HeadConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, target_hidden_size=HIDDEN, intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        eagle_aux_hidden_state_layer_ids=(1,), max_position_embeddings=64, ptd_token_id=3,
    )  # fmt: skip
    selector = PathSelector(SelectorConfig(rank, count), config)
    for parameter in selector.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    selector = selector.to(DEVICE, dtype).eval()
    given = [
        torch.randn(VOCABULARY, HIDDEN), torch.randn(requests, positions, HIDDEN),
        torch.randn(requests, positions, VOCABULARY),
    ]  # fmt: skip
    embeddings, states, logits = (x.to(DEVICE, dtype) for x in given)
    first = torch.randint(VOCABULARY, (requests,), device=DEVICE)
    return selector, selector.tables(embeddings), states, logits, first


CASES = [
    # Ranks and candidates that fill no power of two, and more columns than one turn of the loop.
    (8, 16, torch.float32), (5, 11, torch.bfloat16), (1, 1, torch.float32),
    (selector_triton.COLUMNS + 3, 2, torch.float32),
    (selector_triton.COLUMNS + 3, 16, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("positions", [1, 4])
@pytest.mark.parametrize(("rank", "count", "dtype"), CASES, ids=str)
@torch.no_grad()
def test_the_walk_is_the_references(
    rank: int, count: int, dtype: torch.dtype, positions: int
) -> None:
    """Catches: a row of another request, position or token; the halves of a gate exchanged; what
    is behind the rank or the candidates taken for a part of them; a walk that goes on from the
    first candidate."""
    selector, tables, states, logits, first = case(rank, count, dtype, 3, positions)
    expected = selector.walk(tables, states, logits, first)
    top, candidates = top_candidates(logits, count)
    tokens = torch.full((3, positions + 1), -7, device=DEVICE)
    tokens[:, 0] = first
    scores = torch.full(top.shape, torch.nan, device=DEVICE)
    projected = selector.project(states)
    selector_triton.walk(
        top, candidates, projected, tables.before, tables.candidate, tokens, scores
    )
    added = selector.corrections(tables, states, tokens[:, :-1], candidates)
    torch.testing.assert_close(scores, top.float() + added, atol=1e-4, rtol=1e-5)
    assert torch.equal(tokens[:, 1:], expected)
    assert count < 3 or not torch.equal(expected, candidates[..., 0])


@torch.no_grad()
def test_a_walk_in_steps_goes_on_from_what_was_put_there() -> None:
    """Catches: drafts that are drawn with noise, and a walk that goes on from its own choice."""
    selector, tables, states, logits, first = case(8, 16, torch.float32, 3, 4)
    top, candidates = top_candidates(logits, 16)
    tokens = torch.full((3, 5), -7, device=DEVICE)
    tokens[:, 0] = first
    scores = torch.full(top.shape, torch.nan, device=DEVICE)
    projected = selector.project(states)
    for position in range(4):
        selector_triton.walk(
            top, candidates, projected, tables.before, tables.candidate, tokens, scores,
            begin=position, end=position + 1,
        )  # fmt: skip
        assert bool((tokens[:, position + 2 :] == -7).all())
        tokens[:, position + 1] = candidates[:, position, 5]
    drawn = selector.walk(tables, states, logits, first, lambda _, ids, position: ids[:, 5])
    assert torch.equal(tokens[:, 1:], drawn)
    added = selector.corrections(tables, states, tokens[:, :-1], candidates)
    torch.testing.assert_close(scores, top + added)


@pytest.mark.parametrize(("rank", "count", "dtype"), CASES, ids=str)
@torch.no_grad()
def test_a_request_that_is_not_finite_gets_candidates_of_its_own(
    rank: int, count: int, dtype: torch.dtype
) -> None:
    """Catches, on a GPU: of scores that are all NaN the largest was one behind the candidates. What
    was read there stood for a token, and its row of the tables may be anywhere."""
    selector, tables, states, logits, first = case(rank, count, dtype, 3, 4)
    top, candidates = top_candidates(logits, count)
    tokens = torch.full((3, 5), -7, device=DEVICE)
    tokens[:, 0] = first
    states[2] = torch.nan
    selector_triton.walk(
        top, candidates, selector.project(states), tables.before, tables.candidate, tokens,
        torch.empty(top.shape, device=DEVICE),
    )  # fmt: skip
    assert bool((candidates == tokens[:, 1:, None]).any(-1).all())
    expected = selector.walk(tables, states[:2], logits[:2], first[:2])
    assert torch.equal(tokens[:2, 1:], expected)
