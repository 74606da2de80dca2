"""Response objects of /v1/responses with the fields of OpenAI's published schema."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# vLLM's own fields, which no client of OpenAI's API knows: left out where they are null.
_OWN = ("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages")
_PER_TURN = "_per_turn"
_TOOLS = ("tool_output_tokens",)  # counted for tools that the server runs: there are none
# Fields that may be absent in the schema, but not null.
_NOT_NULL = ("user", "usage")
_NOT_NULL_IN_TOOLS = frozenset(
    {"allowed_callers", "async", "defer_loading", "description", "format", "output_schema"}
)
_NOT_NULL_IN_ITEMS = ("async", "caller", "namespace", "phase", "status")
_OF_EVENTS = ("output_index", "sequence_number")
_TEXT = {"format": {"type": "text"}}


def published(response: Mapping[str, Any]) -> dict[str, Any]:
    """The response without fields and nulls that the schema does not have, and with those that
    it requires."""
    found = {
        name: value
        for name, value in response.items()
        if value is not None or name not in (*_OWN, *_NOT_NULL)
    }
    found.setdefault("error", None)
    found["text"] = _TEXT | _without_nulls(found.get("text") or {}, ("format",))
    if (reasoning := found.get("reasoning")) is not None:
        found["reasoning"] = _without_nulls(reasoning, ("mode", "context"))
    found["tools"] = [_published_tool(tool) for tool in found.get("tools", ())]
    found["output"] = [published_item(item) for item in found.get("output", ())]
    if (usage := found.get("usage")) is not None:
        found["usage"] = {
            name: {
                key: n
                for key, n in value.items()
                if key not in _TOOLS and not key.endswith(_PER_TURN)
            }
            if isinstance(value, Mapping)
            else value
            for name, value in usage.items()
        }
    return found


def _published_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool without nulls; a namespace holds tools itself."""
    found = _without_nulls(tool, _NOT_NULL_IN_TOOLS)
    if "tools" in found:
        found["tools"] = [_published_tool(inner) for inner in found["tools"]]
    return found


def published_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of the output without nulls, and without fields of the event that brought it, which
    vLLM puts into calls of gpt-oss; its texts have a list of logprobs, empty if need be."""
    found = _without_nulls(item, _NOT_NULL_IN_ITEMS)
    for name in _OF_EVENTS:
        found.pop(name, None)
    if found.get("type") == "message":
        found["content"] = [published_part(part) for part in found["content"]]
    return found


def published_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A content part of a message; an output text has a list of logprobs, empty if need be."""
    if part.get("type") == "output_text" and part.get("logprobs") is None:
        return {**part, "logprobs": []}
    return dict(part)


def published_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event of a stream, with the response, item or part that it holds as published."""
    found = dict(event)
    for field, rewrite in (
        ("response", published),
        ("item", published_item),
        ("part", published_part),
    ):
        if isinstance(found.get(field), Mapping):
            found[field] = rewrite(found[field])
    return found


def _without_nulls(value: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None or key not in names}
