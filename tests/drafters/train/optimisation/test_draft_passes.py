"""A pass over all anchors equals serving, anchor by anchor; partitions have the same gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.model.rope_scaling import RopeScaling
from drafters.train.optimisation.cod import sample_chains
from drafters.train.optimisation.draft_passes import draft_outputs, real_entries
from drafters.train.optimisation.loss import IGNORED, DraftLoss, Kind
from drafters.train.optimisation.step import Batch, accumulate_gradients, segments
from tests.drafters.model.whole_text import draft

VOCABULARY, WIDTH, DEPTH = 40, 16, 5
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
VARIANTS: list[dict[str, Any]] = [
    {"ptd_token_id": 3, "fc_norm": True},
    {"ptd_token_id": 3, "norm_before_residual": True, "draft_vocab_size": 12},
    {},
    {"norm_output": True, "norm_before_fc": True},
    {"norm_before_residual": True, "draft_vocab_size": 12, "attention_bias": True},
    # Less than a text in the window, and layers of both kinds.
    {**SLIDING, "ptd_token_id": 3, "qk_norm": True},
    {**SLIDING, "rope_scaling": RopeScaling("llama3", 8.0, 16)},
]


def new_head(config: HeadConfig, **changes: Any) -> DraftHead:
    torch.manual_seed(4)
    config = replace(config, **{"ptd_token_id": None, "fc_norm": False, **changes})
    head = DraftHead(config, own_embeddings=config.method == "p-eagle")
    for parameter in head.parameters():
        # Norms near one: otherwise float error, and not the partition, decides the comparison.
        torch.nn.init.normal_(parameter, std=0.4 if parameter.ndim > 1 else 0.2)
        if parameter.ndim == 1:
            parameter.data += 1.0
    if config.draft_vocab_size:
        head.set_draft_vocabulary(torch.arange(0, 36, 3))
    head.share(embeddings=torch.randn(VOCABULARY, WIDTH), lm_head=torch.randn(VOCABULARY, WIDTH))
    return head


def new_batch(head: DraftHead, *, final: bool) -> Batch:
    torch.manual_seed(9)
    tokens = torch.randint(VOCABULARY, (3, 21))
    taps = torch.randn(3, 20, head.config.taps_size)
    ends = torch.tensor([21, 17, 12])
    states = torch.randn(3, 20, WIDTH) if final else None
    return Batch(tokens, torch.tensor([4, 6, 4]), ends, taps, states)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_drafts_of_all_anchors_equal_serving(config: HeadConfig, variant: dict[str, Any]) -> None:
    head = new_head(config, **variant).eval()
    batch = new_batch(head, final=False)
    anchors = torch.arange(3, 20)
    with torch.no_grad():
        entries = real_entries(head, batch.tokens, batch.taps)
        later = draft_outputs(head, entries, [anchors] * (DEPTH - 1))
    outputs = [entries.output[:, anchors], *later]
    got = head.to_target(head.logits(torch.stack(outputs, dim=2)).argmax(-1))
    assert len(got.flatten().unique()) > 4  # a head that always says the same agrees with anything
    for row in range(3):
        for index, anchor in enumerate(anchors.tolist()):
            tokens, taps = batch.tokens[row, 1 : anchor + 2], batch.taps[row, : anchor + 1]
            assert torch.equal(got[row, index], draft(head, tokens, taps, DEPTH))


def brute_force(loss: DraftLoss, batch: Batch, chains: list[torch.Tensor]) -> torch.Tensor:
    """The same loss with a pass of its own for every draft, and no reuse of anything."""
    head, losses = loss.head, []

    def score(output: torch.Tensor, row: int, predicted: int) -> None:
        label = loss.wanted(batch.labels(torch.tensor([predicted])))[row]
        if label[0] < 0:
            return
        wanted: torch.Tensor = label
        if batch.final is not None:
            matrix = (
                loss.lm_head if head.config.draft_vocab_size is None else loss.lm_head[head.t2d]
            )
            logits = batch.final[row, predicted - 1][None] @ matrix.T
            if loss.softcap is not None:
                logits = loss.softcap * torch.tanh(logits / loss.softcap)
            wanted = logits.softmax(-1)
        losses.append(functional.cross_entropy(head.logits(output)[None], wanted))

    for row in range(len(batch.tokens)):
        for anchor in range(batch.context):
            ids = batch.tokens[row, 1 : anchor + 2]
            hidden = head.fuse(batch.taps[row, : anchor + 1])
            reach = sum(bool((chain == anchor).any()) for chain in chains)
            for depth in range(reach + 1):
                n = len(ids)
                output, carried = head(ids[None], hidden[None], torch.arange(n)[None], None)
                score(output[0, -1], row, anchor + depth + 2)
                if depth == reach:
                    break
                if head.config.method == "p-eagle":
                    more, state = torch.tensor([3]), head.fuse(head.mask_hidden)
                else:
                    more, state = batch.tokens[row, anchor + depth + 2][None], carried[0, -1:]
                ids, hidden = torch.cat([ids, more]), torch.cat([hidden, state])
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("kind", "softcap"), [("labels", None), ("distribution", None), ("distribution", 2.0)]
)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_equal_brute_force_for_every_partition(
    config: HeadConfig, variant: dict[str, Any], kind: Kind, softcap: float | None
) -> None:
    head = new_head(config, **variant)
    batch = new_batch(head, final=kind == "distribution")
    loss = DraftLoss(head, torch.randn(VOCABULARY, WIDTH), kind, softcap)
    generator = torch.Generator().manual_seed(1)
    chains = sample_chains(3, 18, generator, k_train=DEPTH, retain=0.7)
    expected = brute_force(loss, batch, chains)
    expected.backward()
    gradients = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    for partitions in (1, 2, 3, 20):
        head.zero_grad()
        losses = accumulate_gradients(loss, batch, chains, partitions)
        torch.testing.assert_close(losses.sums.sum() / losses.counts.sum(), expected.detach())
        assert {n for n, p in head.named_parameters() if p.grad is not None} == set(gradients)
        for name, parameter in head.named_parameters():
            if name in gradients:
                torch.testing.assert_close(
                    parameter.grad,
                    gradients[name],
                    rtol=1e-3,
                    # Sums in another order differ by 1e-4 of the largest entry at most; a draft
                    # left out moves some entry by a tenth of it.
                    atol=1e-3 * float(gradients[name].abs().max()),
                    msg=lambda text, name=name: f"{name}: {text}",
                )


def test_a_partition_keeps_chains_whole_and_loses_none() -> None:
    chains = sample_chains(3, 90, torch.Generator().manual_seed(2), k_train=6)
    parts = list(segments(chains, 4, 100))
    assert len(parts) == 4
    for depth, chain in enumerate(chains):
        assert torch.equal(torch.cat([part[depth] for part in parts if len(part) > depth]), chain)
    for part in parts:
        for shallow, deep in pairwise(part):
            assert torch.isin(deep, shallow).all()


def test_labels_skip_the_prompt_and_the_text_behind_the_end(config: HeadConfig) -> None:
    empty = torch.empty(0)
    batch = Batch(torch.arange(8)[None] + 10, torch.tensor([4]), torch.tensor([7]), empty, None)
    # Entry p predicts token p + 2. The first draft follows token 4, the first generated one.
    assert batch.labels(torch.arange(7) + 2)[0].tolist() == [IGNORED] * 3 + [15, 16] + [IGNORED] * 2
    assert batch.labels(torch.tensor([3, 4]) + 3)[0].tolist() == [16, IGNORED]


def test_a_batch_without_a_draft_changes_nothing(config: HeadConfig) -> None:
    head = new_head(config)
    batch = replace(new_batch(head, final=False), prompts=torch.tensor([21, 21, 21]))
    losses = accumulate_gradients(DraftLoss(head, torch.empty(0), "labels"), batch, [], 2)
    assert losses.counts.sum() == 0
    assert all(parameter.grad is None for parameter in head.parameters())
