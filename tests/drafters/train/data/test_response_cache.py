from __future__ import annotations

from pathlib import Path

import torch

from drafters.train.data.response_cache import ResponseCache
from drafters.train.data.token_sequences import Text


def text(prompt: list[int], *response: int) -> Text:
    return Text(torch.tensor([*prompt, *response]), len(prompt))


def ids(cache: ResponseCache, prompts: list[list[int]]) -> list[list[int]]:
    return [text.tokens.tolist() for text in cache.responses(prompts)]


def test_responses_are_found_by_their_prompts(tmp_path: Path):
    cache = ResponseCache(tmp_path)
    missing = cache.missing([[1], [2, 3]])
    assert missing == [([1], 0), ([2, 3], 0)]
    cache.add(missing, [text([2, 3], 7), text([1], 8, 9)])  # as they come from a server
    for found in (cache, ResponseCache(tmp_path)):
        assert found.missing([[5], [2, 3], [1]]) == [([5], 0)]
        assert ids(found, [[2, 3], [1]]) == [[2, 3, 7], [1, 8, 9]]


def test_a_prompt_that_is_asked_again_gets_another_response(tmp_path: Path):
    first = ResponseCache(tmp_path)
    first.add(first.missing([[1]]), [text([1], 5)])
    second = ResponseCache(tmp_path)
    assert second.missing([[1], [1]]) == [([1], 1)]
    second.add(second.missing([[1], [1]]), [text([1], 6)])
    assert sorted(ids(ResponseCache(tmp_path), [[1], [1]])) == [[1, 5], [1, 6]]


def test_a_response_without_a_token_is_one(tmp_path: Path):
    cache = ResponseCache(tmp_path)
    cache.add(cache.missing([[1]]), [text([1])])
    assert ResponseCache(tmp_path).missing([[1]]) == []
