"""Nulls that OpenAI's schema of chat and completions does not have, taken out."""

from __future__ import annotations

import re
from typing import Any

# Fields that the schema declares nullable; any other null is left out.
_NULLABLE = frozenset({"content", "refusal", "logprobs", "finish_reason", "usage", "bytes"})
_STREAMED_NULL = re.compile(rf',"(?!(?:{"|".join(sorted(_NULLABLE))})")[a-z_]+":null')


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
    """The same on an event's JSON text. Quotes inside JSON strings are escaped, so the
    pattern can only match a field."""
    return _STREAMED_NULL.sub("", event) if "null" in event else event
