"""Speculation costs no hits of the prefix cache."""

from __future__ import annotations

import httpx
import pytest

from .gateway import MODEL

BLOCK = 128  # tokens of a KV cache block on a CPU (vllm/platforms/cpu.py)


def cached(http: httpx.Client, prompt: list[int]) -> int:
    """How many tokens of the prompt were found in the prefix cache."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, "n": 1}
    answer = http.post("/v1/completions", json=body)
    usage = answer.raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 1])
def test_a_repeated_prompt_is_cached_up_to_its_last_whole_block(
    http: httpx.Client, length: int
) -> None:
    """All but the last token may be cached, as without drafts."""
    prompt = [1000 + (length * 31 + place * 7) % 500 for place in range(length)]
    assert cached(http, prompt) == 0
    assert cached(http, prompt) == (length - 1) // BLOCK * BLOCK


def test_prompts_with_one_beginning_share_its_blocks(http: httpx.Client) -> None:
    beginning = [2000 + place * 11 % 700 for place in range(2 * BLOCK)]
    assert cached(http, [*beginning, 5, 6, 7]) == 0
    for end in ([8, 9], [10] * 40, [11]):
        assert cached(http, [*beginning, *end]) == 2 * BLOCK
