"""The path selector, against its formula written out for one request and candidate at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from drafters.model.selector import PathSelector, top_candidates

REQUESTS, POSITIONS, DRAFTS = 5, 4, 25


def head_with_selector(config: HeadConfig) -> DraftHead:
    """A head with a random selector, whose target is narrower than itself."""
    torch.manual_seed(1)
    config = replace(config, draft_vocab_size=DRAFTS, target_hidden_size=12)
    head = DraftHead(config)
    head.set_draft_vocabulary(torch.arange(15, 40))
    head.share(embeddings=torch.randn(40, 12), lm_head=torch.zeros(0))
    for parameter in head.add_selector(SelectorConfig(4, candidates=6)).parameters():
        torch.nn.init.normal_(parameter)
    return head


def selector_of(head: DraftHead) -> PathSelector:
    assert head.selector is not None
    return head.selector


def score_of(head: DraftHead, state: torch.Tensor, before: int, candidate: int) -> float:
    """What the module's docstring adds to the logit of a candidate; both are target ids."""
    selector = selector_of(head)
    weights = dict(selector.named_parameters())
    embeddings = head._shared["embeddings"]
    norm = state.square().mean().add(head.config.rms_norm_eps).sqrt()
    state = state / norm * weights["norm.weight"]
    side = weights["before.weight"] @ embeddings[before]
    own = weights["state.weight"] @ state + weights["state.bias"]
    query = functional.silu((own + side)[:4]) * (own + side)[4:]
    return float(query @ (weights["candidate.weight"] @ embeddings[candidate]))


@torch.no_grad()
def test_the_walk_chooses_the_best_candidate_behind_the_one_before(config: HeadConfig) -> None:
    head = head_with_selector(config)
    states = torch.randn(REQUESTS, POSITIONS, config.hidden_size)
    logits = torch.randn(REQUESTS, POSITIONS, DRAFTS)
    first = torch.randint(DRAFTS, (REQUESTS,))
    walked = selector_of(head).walk(head.selector_tables(), states, logits, first)
    changed = 0
    for request in range(REQUESTS):
        before = int(first[request])
        for position in range(POSITIONS):
            row = logits[request, position]
            candidates = row.argsort(descending=True)[:6].tolist()
            scores = {
                b: float(row[b]) + score_of(head, states[request, position], before + 15, b + 15)
                for b in candidates
            }
            before = max(candidates, key=scores.__getitem__)
            assert int(walked[request, position]) == before
            changed += before != candidates[0]
    assert changed  # else the selector would not have been seen at all


@torch.no_grad()
def test_corrections_are_what_the_walk_adds(config: HeadConfig) -> None:
    """Training scores given predecessors by `corrections`; serving walks."""
    head = head_with_selector(config)
    tables, selector = head.selector_tables(), selector_of(head)
    states = torch.randn(REQUESTS, POSITIONS, config.hidden_size)
    logits = torch.randn(REQUESTS, POSITIONS, DRAFTS)
    first = torch.randint(DRAFTS, (REQUESTS,))
    walked = selector.walk(tables, states, logits, first)
    before = torch.cat([first[:, None], walked[:, :-1]], dim=1)
    top, candidates = top_candidates(logits, 6)
    scores = top + selector.corrections(tables, states, before, candidates)
    again = candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    assert torch.equal(walked, again)


@torch.no_grad()
def test_a_new_selector_changes_nothing(config: HeadConfig) -> None:
    head = DraftHead(config).bfloat16()
    head.share(embeddings=torch.randn(40, 16).bfloat16(), lm_head=torch.zeros(40, 16).bfloat16())
    selector = head.add_selector(SelectorConfig(4))
    assert {parameter.dtype for parameter in selector.parameters()} == {torch.bfloat16}
    logits = torch.randn(REQUESTS, POSITIONS, 40)
    states = torch.randn(REQUESTS, POSITIONS, 16).bfloat16()
    walked = selector.walk(head.selector_tables(), states, logits, torch.zeros(REQUESTS).long())
    assert torch.equal(walked, logits.argmax(-1))


@torch.no_grad()
def test_the_walk_goes_on_from_what_is_picked(config: HeadConfig) -> None:
    """As drafts drawn with noise are: not from the candidate with the largest score."""
    head = head_with_selector(config)
    selector, tables = selector_of(head), head.selector_tables()
    states = torch.randn(REQUESTS, 2, config.hidden_size)
    logits = torch.randn(REQUESTS, 2, DRAFTS)
    first = torch.randint(DRAFTS, (REQUESTS,))
    seen: list[torch.Tensor] = []

    def last(scores: torch.Tensor, candidates: torch.Tensor, position: int) -> torch.Tensor:
        assert position == len(seen)
        seen.append(scores)
        return candidates[:, -1]

    walked = selector.walk(tables, states, logits, first, last)
    top, candidates = top_candidates(logits, 6)
    assert torch.equal(walked, candidates[:, :, -1])
    added = selector.corrections(tables, states[:, 1], walked[:, 0], candidates[:, 1])
    torch.testing.assert_close(seen[1], top[:, 1] + added)


@pytest.mark.parametrize("size", [64, 1024, 1030])
def test_candidates_are_the_largest_logits(size: int) -> None:
    """Catches: a column of the folded matrix left out, an id of another column; sizes that cannot
    be folded. Many logits are equal, as in bfloat16."""
    torch.manual_seed(0)
    for logits in (torch.randn(7, 3, size), torch.randint(40, (7, 3, size)).bfloat16()):
        top, ids = top_candidates(logits, 16)
        assert torch.equal(top, logits.topk(16, dim=-1).values)
        assert torch.equal(logits.gather(-1, ids), top)
        assert all(len(set(row)) == 16 for row in ids.flatten(0, 1).tolist())


def test_a_walk_over_no_position_is_empty(config: HeadConfig) -> None:
    head = head_with_selector(config)
    walked = selector_of(head).walk(
        head.selector_tables(),
        torch.zeros(3, 0, 16),
        torch.zeros(3, 0, DRAFTS),
        torch.zeros(3).long(),
    )
    assert walked.shape == (3, 0)


def test_gradients_reach_every_parameter(config: HeadConfig) -> None:
    head = head_with_selector(config)
    selector = selector_of(head)
    added = selector.corrections(
        head.selector_tables(),
        torch.randn(3, config.hidden_size),
        torch.tensor([0, 1, 2]),
        torch.tensor([[3, 4], [5, 6], [7, 8]]),
    )
    added.square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in selector.parameters())


def test_embeddings_of_another_width_are_refused(config: HeadConfig) -> None:
    head = head_with_selector(config)
    with pytest.raises(ValueError, match="embeddings of 16 do not fit a path selector of 12"):
        head.share(embeddings=torch.zeros(40, 16), lm_head=torch.zeros(0))
    with pytest.raises(ValueError, match="the head has no path selector"):
        DraftHead(config).selector_tables()
