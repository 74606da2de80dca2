"""Null fields of requests and answers.

In a request a null means that the field is not given. An answer has only those nulls that OpenAI's
schemas of chat and completions have.
"""

from __future__ import annotations

import re
from typing import Any

# Fields that the schema declares nullable; any other null is left out.
_NULLABLE = frozenset({"content", "refusal", "logprobs", "finish_reason", "usage", "bytes"})
_STREAMED_NULL = re.compile(rf',"(?!(?:{"|".join(sorted(_NULLABLE))})")[a-z_]+":null')

# Fields of a request that hold the client's own data: schemas, arguments, variables, prompts.
# A null inside of one is a value like any other.
_CLIENT_DATA = frozenset(
    {
        *("parameters", "input_schema", "schema", "json"),  # schemas
        *("arguments", "input", "input_examples"),  # what a tool is called with
        *("metadata", "client_metadata", "documents"),
        *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"),
        *("logit_bias", "prompt", "tokens"),
    }
)


_LOGPROBS = '"logprobs":{"content":'
_LOGPROBS_WITH_REFUSAL = '"logprobs":{"refusal":null,"content":'
_USAGE = '"usage":'


def drop_null_fields(payload: dict[str, Any]) -> None:
    """Delete each null field of a request, at any depth and in place. Lists keep their nulls.

    In OpenAI's and Anthropic's APIs a null field is one that is not given.
    """
    waiting: list[Any] = [payload]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(item for item in value if isinstance(item, dict | list))
        elif value.get("type") != "structural_tag":  # a grammar, written as JSON
            for name in [name for name, item in value.items() if item is None]:
                del value[name]
            waiting.extend(
                item
                for name, item in value.items()
                if isinstance(item, dict | list) and not _is_client_data(name, value is payload)
            )


def _is_client_data(name: str, at_top: bool) -> bool:
    """Whether a field holds the client's own JSON. `input` at the top is Responses' messages."""
    return name in _CLIENT_DATA and not (at_top and name == "input")


def without_nulls(value: Any) -> Any:
    """A copy without null fields, but for the nullable ones. Lists keep their nulls."""
    if isinstance(value, dict):
        return {
            key: without_nulls(item)
            for key, item in value.items()
            if item is not None or key in _NULLABLE
        }
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def without_streamed_nulls(event: str) -> str:
    """Leave null fields out of an event's JSON text, as `without_nulls` does.

    Quotes inside of JSON strings are escaped, so the pattern can match fields only.
    """
    return _STREAMED_NULL.sub("", event) if "null" in event else event


def with_required_nulls(answer: dict[str, Any]) -> dict[str, Any]:
    """A chat answer whose logprobs have the `refusal` that the schema requires."""
    for choice in answer.get("choices", ()):
        if choice.get("logprobs") is not None:
            choice["logprobs"].setdefault("refusal", None)
    return answer


def with_streamed_required_nulls(event: str, *, usage: bool) -> str:
    """Add `refusal` to an event's JSON text, as `with_required_nulls` does.

    With `usage`, chunks before the one with the usage get `"usage": null`, as in OpenAI's API for
    `include_usage`.
    """
    event = event.replace(_LOGPROBS, _LOGPROBS_WITH_REFUSAL)
    if usage and event.startswith("data: {") and _USAGE not in event:
        event = event.rstrip().removesuffix("}") + f",{_USAGE}null}}\n\n"
    return event
