"""Drafting step by step with a cache, compared with passes over the whole text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters.model.config import HeadConfig
from drafters.model.drafting import draft
from drafters.model.head import DraftHead


def _pass(
    head: DraftHead, tokens: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One causal pass over a whole sequence, no cache."""
    output, carried = head(tokens[None], hidden[None], torch.arange(len(tokens))[None], None)
    return head.logits(output[0]).argmax(-1), carried[0]


@torch.no_grad()
def _full(head: DraftHead, tokens: torch.Tensor, taps: torch.Tensor, count: int) -> torch.Tensor:
    hidden = head.fuse(taps)
    if head.config.method == "p-eagle":
        slots = count - 1
        ids = torch.cat([tokens, torch.full((slots,), head.config.ptd_token_id)])
        hidden = torch.cat([hidden, head.fuse(head.mask_hidden).expand(slots, -1)])
        return head.to_target(_pass(head, ids, hidden)[0][len(tokens) - 1 :])
    for _ in range(count):
        drafted, carried = _pass(head, tokens, hidden)
        tokens = torch.cat([tokens, head.to_target(drafted[-1:])])
        hidden = torch.cat([hidden, carried[-1:]])
    return tokens[-count:]


SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5}


@pytest.mark.parametrize("layers", [{}, SLIDING, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("draft_vocab_size", [None, 25])
@pytest.mark.parametrize("token", [3, None])
def test_incremental_equals_full_recompute(
    config: HeadConfig,
    token: int | None,
    draft_vocab_size: int | None,
    norm_output: bool,
    layers: dict[str, Any],
) -> None:
    torch.manual_seed(4)
    head = DraftHead(
        replace(
            config,
            ptd_token_id=token,
            draft_vocab_size=draft_vocab_size,
            norm_output=norm_output,
            **layers,
        ),
        own_embeddings=False,
    ).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    if draft_vocab_size:
        head.set_draft_vocabulary(torch.arange(15, 40))
    head.share(embeddings=torch.randn(40, 16), lm_head=torch.randn(40, 16))
    taps, tokens = torch.randn(20, 48), torch.randint(40, (20,))
    cache, seen = head.new_cache(1, 40), 0
    drafts = []
    for new, count in ((6, 4), (1, 7), (3, 1), (5, 5), (5, 3)):
        part = slice(seen, seen + new)
        got = draft(head, cache, tokens[part], taps[part], count)
        seen += new
        assert torch.equal(got, _full(head, tokens[:seen], taps[:seen], count))
        assert cache.length == seen  # what was drafted must leave the cache, or is seen as text
        drafts.append(got.tolist())
    assert len({tuple(item) for item in drafts}) == len(drafts)  # the inputs matter
    if draft_vocab_size:
        assert min(min(item) for item in drafts) >= 15


@pytest.mark.parametrize("token", [3, None])
def test_everything_is_on_the_heads_device(config: HeadConfig, token: int | None) -> None:
    """`meta` computes shapes only, and refuses a tensor that was left on the CPU."""
    config = replace(config, ptd_token_id=token, draft_vocab_size=25)
    head = DraftHead(config).to("meta")
    tokens = torch.zeros(5, dtype=torch.int64, device="meta")
    drafted = draft(head, head.new_cache(1, 8), tokens, torch.zeros(5, 48, device="meta"), 3)
    assert drafted.device.type == "meta"
    assert drafted.shape == (3,)


def test_a_head_without_the_targets_matrices_says_so(config: HeadConfig) -> None:
    head = DraftHead(config, own_embeddings=False)
    with pytest.raises(RuntimeError, match=r"no embeddings of its own: call share\(\)"):
        draft(head, head.new_cache(1, 8), torch.tensor([1]), torch.randn(1, 48), 2)


@pytest.mark.parametrize(("entries", "count"), [(0, 3), (1, 0)])
def test_nothing_to_draft_from_is_refused(config: HeadConfig, entries: int, count: int) -> None:
    head = DraftHead(config)
    tokens = torch.zeros(entries, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least one"):
        draft(head, head.new_cache(1, 8), tokens, torch.randn(entries, 48), count)
