"""Response shapes: OpenAI's own types, and the fields its schema does not allow to be null."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

# The client's types make every optional field nullable; the published schema does not.
DETAILS = {
    "completion_tokens_details",
    "prompt_tokens_details",
    "cached_tokens",
    "audio_tokens",
    "reasoning_tokens",
    "accepted_prediction_tokens",
    "rejected_prediction_tokens",
}
COMMON = DETAILS | {"id", "object", "created", "model", "choices", "index", "system_fingerprint"}
MESSAGE = {"annotations", "function_call", "tool_calls", "role", "top_logprobs", "token"}
CHAT = COMMON | MESSAGE | {"message"}
CHUNK = COMMON | MESSAGE | {"delta"}
COMPLETION = COMMON | {"text"}


def nulls(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of every null in a JSON value."""
    if value is None:
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from nulls(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from nulls(inner, f"{path}.{i}")


def assert_never_null(body: dict[str, Any], names: set[str]) -> None:
    wrong = [path for path in nulls(body) if path.rpartition(".")[2] in names]
    assert not wrong, f"null where the schema allows none: {wrong}"


def chat(body: dict[str, Any]) -> ChatCompletion:
    parsed = ChatCompletion.model_validate(body)
    assert_never_null(body, CHAT)
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens
    assert [c.index for c in parsed.choices] == list(range(len(parsed.choices)))
    for choice in body["choices"]:
        assert {"content", "refusal"} <= set(choice["message"]), (
            "required by the schema, though nullable"
        )
        assert "logprobs" in choice, "required by the schema, though nullable"
    return parsed


def chunk(body: dict[str, Any]) -> ChatCompletionChunk:
    parsed = ChatCompletionChunk.model_validate(body)
    assert_never_null(body, CHUNK)
    assert all("finish_reason" in c for c in body["choices"]), (
        "required by the schema, though nullable"
    )
    return parsed


def completion(body: dict[str, Any]) -> Completion:
    parsed = Completion.model_validate(body)
    assert_never_null(body, COMPLETION)
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens
    return parsed
