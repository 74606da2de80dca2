"""How a head's layers keep their keys and values."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, replace_as


def kept_whole(specs: dict[str, Any], head: Collection[str], block_size: int) -> dict[str, Any]:
    """vLLM's KV cache specs by layer, those of `head` with blocks for all tokens.

    A sliding layer computes as before. But vLLM would give away its blocks behind the window, where
    the head may still have to enter what it missed while nothing was drafted; and layers of both
    kinds would land in two KV cache groups, of which a drafter has one.
    """
    return {
        name: replace_as(
            spec,
            FullAttentionSpec,
            drop=("extra_retained_tokens",),
            block_size=block_size,
            page_size_padded=None,
        )
        if name in head and isinstance(spec, SlidingWindowSpec)
        else spec
        for name, spec in specs.items()
    }
