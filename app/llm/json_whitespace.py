"""Limits white space in JSON that a structural tag constrains (forced tool calls)."""

from __future__ import annotations

import json
from typing import Any

MAX_WHITESPACE = 1  # xgrammar takes no 0


def bounded(tag: str) -> str:
    """The structural tag with at most one white space in a row inside of its JSON.

    vLLM's `disable_any_whitespace` reaches schemas, but not those inside of a structural tag,
    where a model may go on with white space until its tokens run out.
    """
    try:
        content = json.loads(tag)
    except ValueError:
        return tag  # vLLM's check says what is wrong with it
    _bound(content)
    return json.dumps(content)


def _bound(value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _bound(item)
    elif isinstance(value, dict) and value.get("type") != "json_schema":
        for item in value.values():
            _bound(item)
    elif isinstance(value, dict) and value.get("max_whitespace_cnt") is None:
        value["max_whitespace_cnt"] = MAX_WHITESPACE
