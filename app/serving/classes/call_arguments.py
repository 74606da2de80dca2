"""The arguments of a tool call, which are a JSON object, and those of a call that was cut."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pydantic_core import from_json


def is_object(text: str) -> bool:
    """Whether a text is a whole JSON object, as the arguments of a call have to be."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def is_stop(reason: str | int | None, stop_tokens: Collection[int] | None) -> bool:
    """Whether vLLM's `stop_reason` is a stop string or one of the request's stop tokens: the end of
    a turn may have a number, too."""
    return isinstance(reason, str) or reason in (stop_tokens or ())


def ends_early(arguments: str, *, stopped: bool) -> bool:
    """Whether arguments of a call are not whole: `stopped`, or the beginning of an object."""
    return not is_object(arguments) and (stopped or partial_object(arguments) is not None)


def partial_object(text: str) -> dict[str, Any] | None:
    """The complete members of an object that ends early; None for text that begins no object."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
