"""KV cache specs of a draft head's layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, replace_as


def kept_whole(specs: dict[str, Any], head: Collection[str], block_size: int) -> dict[str, Any]:
    """vLLM's KV cache specs by layer, with sliding-window layers of `head` keeping all tokens.

    Their attention does not change. But vLLM would free their blocks before the window, into which
    the head may still have to enter tokens that it missed at K = 0. And a head with layers of both
    kinds would be in two KV cache groups, while a drafter has one.
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
