"""Nulls: OpenAI's schema allows them in few places."""

from __future__ import annotations

from app.engine.adapter import without_nulls, without_streamed_nulls


def test_only_nullable_fields_keep_their_null() -> None:
    body = {
        "choices": [{"message": {"content": None, "annotations": None}, "logprobs": None}],
        "usage": {"prompt_tokens_details": None, "total_tokens": 0},
        "tokens": [None, 1],
    }
    assert without_nulls(body) == {
        "choices": [{"message": {"content": None}, "logprobs": None}],
        "usage": {"total_tokens": 0},
        "tokens": [None, 1],
    }


def test_streamed_nulls_go_and_text_that_looks_like_one_stays() -> None:
    text = r'"content":"say ,\"token_ids\":null please"'
    event = (
        f'data: {{"delta":{{{text}}},"logprobs":null,"token_ids":null,"finish_reason":null}}\n\n'
    )
    expected = f'data: {{"delta":{{{text}}},"logprobs":null,"finish_reason":null}}\n\n'
    assert without_streamed_nulls(event) == expected
