"""Drafting step by step with a cache against one pass over everything."""

from __future__ import annotations

import torch
from torch.nn import functional

from drafters.model.config import HeadConfig
from drafters.model.drafting import draft
from drafters.model.peagle import PEagleHead


def _full(
    head: PEagleHead, lm_head: torch.Tensor, tokens: torch.Tensor, taps: torch.Tensor, count: int
) -> torch.Tensor:
    """No cache: all entries and the slots of the last one in a single causal pass."""
    ids = torch.cat([tokens, torch.full((count - 1,), head.config.ptd_token_id)])
    hidden = torch.cat([head.fuse(taps), head.fuse(head.mask_hidden).expand(count - 1, -1)])
    n = len(ids)
    causal = torch.ones(1, n, n, dtype=torch.bool).tril()
    output = head(ids[None], hidden[None], torch.arange(n)[None], causal)
    return functional.linear(output[0, len(tokens) - 1 :], lm_head).argmax(-1)


def test_incremental_equals_full_recompute(config: HeadConfig) -> None:
    torch.manual_seed(4)
    head = PEagleHead(config).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    lm_head, taps = torch.randn(40, 16), torch.randn(20, 48)
    tokens = torch.randint(40, (20,))
    cache, seen = head.new_cache(1, 40), 0
    drafts = []
    for new, count in ((6, 4), (1, 7), (3, 1), (5, 5), (5, 3)):
        part = slice(seen, seen + new)
        got = draft(head, lm_head, cache, tokens[part], taps[part], count)
        seen += new
        wanted = _full(head, lm_head, tokens[:seen], taps[:seen], count)
        assert torch.equal(got, wanted)
        assert cache.length == seen  # slots must leave the cache, or the next draft sees them
        drafts.append(got.tolist())
    assert len({tuple(item) for item in drafts}) == len(drafts)  # the inputs matter
