"""P-EAGLE's drafts along a selector's path on the V1 runner, beside one request and one draft at a
time: greedy and sampled requests in one batch, with drafts of different lengths."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from drafters.vllm.path_selector import ServedSelector
from drafters.vllm.v1.layout import Rows
from drafters.vllm.v1.parallel import ParallelDrafter
from drafters.vllm.verification.sampled_drafts import DraftSampling
from drafters.vllm.verification.seeded_sampling import SeededRequests

VOCABULARY, DRAFTS, CANDIDATES = 40, 30, 6
TEMPERATURES = [0.0, 1.0, 0.7, 0.0, 1.3]  # by row of the batch
MADE = [1, 2, 1, 3, 1]  # tokens that each request made in the step
LENGTHS = [[4, 4, 4, 4, 4], [3, 1, 4, 0, 2], [1, 0, 2, 1, 1]]
CPU = torch.device("cpu")


@pytest.fixture
def head(config: HeadConfig) -> DraftHead:
    torch.manual_seed(2)
    head = DraftHead(replace(config, draft_vocab_size=DRAFTS))
    head.set_draft_vocabulary(torch.randperm(VOCABULARY)[:DRAFTS].sort().values)
    torch.nn.init.normal_(head.output_matrix, std=0.5)
    head.share(embeddings=torch.randn(VOCABULARY, 16), lm_head=torch.zeros(0))
    for parameter in head.add_selector(SelectorConfig(4, CANDIDATES)).parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return head.requires_grad_(False)


def drafter_of(head: DraftHead, sampling: DraftSampling | None) -> Any:
    """A ParallelDrafter whose head has run."""
    drafter: Any = ParallelDrafter.__new__(ParallelDrafter)
    drafter.device, drafter.half, drafter.lm_head = CPU, True, None
    drafter.model = SimpleNamespace(
        draft_id_to_target_id=head.d2t, logits_processor=lambda _, hidden: head.logits(hidden)
    )
    drafter._target_ids = head.to_target(torch.arange(DRAFTS))
    drafter._sampling = sampling
    return drafter


def sampling_of() -> DraftSampling:
    places = {row: (row + 7, 5 * row) for row, heat in enumerate(TEMPERATURES) if heat}
    metadata = SimpleNamespace(temperature=torch.tensor(TEMPERATURES), top_k=None, top_p=None)
    seeded = SeededRequests(TopKTopPSampler(), places)
    return DraftSampling(seeded, metadata, np.array(MADE), VOCABULARY)


def served(head: DraftHead) -> ServedSelector:
    assert head.selector is not None
    ids = head.to_target(torch.arange(DRAFTS))
    draft_ids = torch.full((VOCABULARY,), -1).index_put((ids,), torch.arange(DRAFTS))
    return ServedSelector(head.selector, head.selector_tables(), draft_ids)


def one_by_one(
    head: DraftHead, states: torch.Tensor, row: int, sampling: DraftSampling | None
) -> list[int]:
    """The drafts of the request at `row` of the batch, from its states `[k, hidden]`."""
    assert head.selector is not None
    path = list[int]()
    for offset, state in enumerate(states):
        scores, candidates = head.logits(state), torch.arange(DRAFTS)
        if offset:
            candidates = scores.topk(CANDIDATES).indices
            before = torch.tensor(path[-1])
            added = head.selector.corrections(head.selector_tables(), state, before, candidates)
            scores = scores[candidates] + added
        chosen = int(candidates[scores.argmax()])
        if sampling is not None and TEMPERATURES[row]:
            law = torch.full((1, VOCABULARY), -torch.inf)
            law[0, head.to_target(candidates)] = scores / TEMPERATURES[row]
            noise = sampling.seeded.generator(row, MADE[row] + offset, CPU)
            token = sampling.seeded.sampler(law, {0: noise}, None, None)[0]
            chosen = int((head.to_target(torch.arange(DRAFTS)) == token).nonzero())
        path.append(chosen)
    return head.to_target(torch.tensor(path, dtype=torch.int64)).tolist()


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_request_gets_the_path_that_it_gets_alone(
    head: DraftHead, lengths: list[int], greedy: bool
) -> None:
    """Catches: noise of another request or position, a draft of a padded row, a path that goes on
    from a most probable token where another was drawn."""
    rows = np.array([2, 0, 3, 4, 1])  # of the batch, not in its order
    k = np.array(lengths)
    states = torch.randn(int(k.sum()), 16, generator=torch.Generator().manual_seed(1))
    sampling = None if greedy else sampling_of()
    zeros = np.zeros_like(k)
    layout = Rows(rows, zeros, zeros, zeros, zeros, zeros, k, zeros)
    first_draft = np.cumsum(k) - k
    drafter = drafter_of(head, sampling)
    found = ParallelDrafter._walk(drafter, served(head), states, layout, first_draft).tolist()
    expected: list[int] = []
    for row, begin, count in zip(rows.tolist(), first_draft, lengths, strict=True):
        expected += one_by_one(head, states[begin : begin + count], row, sampling)
    assert found == expected
    plain = head.to_target(head.logits(states).argmax(-1)).tolist()
    assert found != plain
    if greedy:
        first = [begin for begin, count in zip(first_draft, lengths, strict=True) if count]
        assert [found[i] for i in first] == [plain[i] for i in first]
