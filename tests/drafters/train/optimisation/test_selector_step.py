"""A path selector's training: every place that counts, each once, with the head as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafters.model.config import SelectorConfig
from drafters.model.head import DraftHead
from drafters.model.selector import top_candidates
from drafters.train.optimisation.draft_passes import draft_outputs, real_entries
from drafters.train.optimisation.loss import DraftLoss, Kind
from drafters.train.optimisation.selector_step import accumulate_selector_gradients
from drafters.train.optimisation.step import Batch
from drafters.train.target import FrozenTarget
from tests.drafters.train.conftest import NewHead

PROMPTS, ENDS = (4, 6), (24, 19)
DRAFTED = range(0, 256, 2)  # a draft vocabulary of every other byte


@pytest.fixture
def head(new_head: NewHead) -> DraftHead:
    head = new_head(draft_vocab_size=len(DRAFTED))
    head.set_draft_vocabulary(torch.tensor(DRAFTED))
    head.requires_grad_(False)
    selector = head.add_selector(SelectorConfig(5, candidates=64))
    torch.nn.init.normal_(selector.candidate.weight)
    return head


@pytest.fixture
def batch(target: FrozenTarget, head: DraftHead) -> Batch:
    """Two texts of few tokens, so that many are among the candidates; some are not drafted."""
    tokens = 2 * torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(3))
    tokens[:, 9] = 31
    taps = target.states(tokens[:, :-1], head.config.eagle_aux_hidden_state_layer_ids).taps
    return Batch(tokens, torch.tensor(PROMPTS), torch.tensor(ENDS), taps, None)


def chains(*sets: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(anchors) for anchors in sets]


@torch.no_grad()
def one_by_one(
    head: DraftHead,
    lm_head: torch.Tensor,
    batch: Batch,
    sets: list[torch.Tensor],
    softcap: float | None,
) -> dict[int, list]:
    """Losses by depth, of one place after another."""
    losses: dict[int, list[torch.Tensor]] = {depth + 1: [] for depth in range(len(sets))}
    tables = head.selector_tables()
    assert head.selector is not None
    drafts = list(DRAFTED)
    entries = real_entries(head, batch.tokens, batch.taps)
    for depth, anchors in enumerate(sets, 1):
        for anchor in anchors.tolist():
            output = draft_outputs(head, entries, [torch.tensor([anchor])] * depth)[-1]
            for row in range(2):
                place = anchor + depth + 2
                if place >= ENDS[row] or place - 1 <= PROMPTS[row]:
                    continue
                before, true = batch.tokens[row, place - 1 : place + 1].tolist()
                if before not in drafts or true not in drafts:
                    continue
                top, candidates = top_candidates(head.logits(output[row, 0]), 64)
                if batch.final is None:
                    wanted = (candidates == drafts.index(true)).float()
                else:
                    logits = lm_head[head.to_target(candidates)] @ batch.final[row, place - 1]
                    if softcap is not None:
                        logits = softcap * torch.tanh(logits / softcap)
                    wanted = logits.softmax(-1)
                if not wanted.any():
                    continue
                scores = top + head.selector.corrections(
                    tables, output[row, 0], torch.tensor(drafts.index(before)), candidates
                )
                losses[depth].append(-(wanted * scores.log_softmax(-1)).sum())
    return losses


@pytest.mark.parametrize(
    ("kind", "softcap"), [("labels", None), ("distribution", None), ("distribution", 0.5)]
)
def test_the_loss_is_that_of_all_places_one_by_one(
    head: DraftHead, target: FrozenTarget, batch: Batch, kind: Kind, softcap: float | None
) -> None:
    # A place counted in the prompt, behind the end, or against the wrong token changes the sums.
    if kind == "distribution":
        final = target.states(batch.tokens[:, :-1], (0,)).final
        batch = replace(batch, final=final)
    sets = chains(list(range(3, 22)), list(range(3, 21)), list(range(3, 20, 2)))
    wanted = one_by_one(head, target.lm_head, batch, sets, softcap)
    loss = DraftLoss(head, target.lm_head, kind, softcap)
    found = accumulate_selector_gradients(loss, batch, sets)
    counts = [len(losses) for losses in wanted.values()]
    assert min(counts) > 0
    anchors = sum(end - prompt - 1 for end, prompt in zip(ENDS, PROMPTS, strict=True))
    assert found.counts.tolist() == [anchors, *counts]
    sums = torch.tensor([0.0, *(float(sum(losses)) for losses in wanted.values())])
    torch.testing.assert_close(found.sums, sums)


def test_only_the_selector_gets_gradients_the_same_in_any_partition(
    head: DraftHead, batch: Batch
) -> None:
    loss = DraftLoss(head, head.output_matrix, "labels")
    sets = chains(list(range(3, 22)), list(range(3, 21)))
    kept = []
    for partitions in (1, 4):
        head.zero_grad()
        accumulate_selector_gradients(loss, batch, sets, partitions)
        kept.append({n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None})
    whole, parts = kept
    assert set(whole) == {n for n, _ in head.named_parameters() if n.startswith("selector.")}
    torch.testing.assert_close(whole, parts)


def test_a_batch_without_a_place_changes_nothing(head: DraftHead, batch: Batch) -> None:
    loss = DraftLoss(head, head.output_matrix, "labels")
    found = accumulate_selector_gradients(loss, batch, chains([0, 1]))  # all in the prompts
    assert found.counts.tolist()[1:] == [0]
    assert all(parameter.grad is None for parameter in head.parameters())
