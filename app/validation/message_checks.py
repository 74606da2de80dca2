"""Checks of messages, content parts and tools, as OpenAI defines them. No vllm import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.validation.field_checks import invalid

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Content parts that hold text -> the field that holds it.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Calls and results, in Responses and in Messages -> the fields that each must have, with types.
_CALLS: dict[str, dict[str, type]] = {
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}
# Blocks of Messages -> the same. vLLM drops a block without its content.
_BLOCKS: dict[str, dict[str, type]] = {
    **_CALLS,
    "text": {"text": str},
    "thinking": {"thinking": str},
    "image": {"source": dict},
}
# Blocks that a system prompt of Messages may have; vLLM drops any other.
_SYSTEM_BLOCKS = ("text", "document", "search_result")
# Fields with which an assistant's message needs no content.
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "reasoning", "reasoning_content")
# Blocks of Messages that change the list of tools in the middle of a conversation.
_TOOL_CHANGES = ("tool_addition", "tool_removal")
_OTHER_PARTS = ("tool_reference", "prompt_embeds")
# Types of parts, and names of fields in them, that hold anything but text, in every dialect.
MEDIA = frozenset(
    {
        *("image", "image_url", "input_image", "image_embeds", "image_pil"),
        *("audio", "audio_url", "input_audio", "audio_embeds"),
        *("video", "video_url", "input_video", "video_embeds"),
        *("file", "input_file"),
    }
)


def check_messages(messages: Any) -> None:
    """Check roles and contents as OpenAI defines them. Raises ApiError naming the exact message."""
    if messages is None:
        raise invalid("messages", "Missing required parameter: 'messages'.", "missing_parameter")
    if not isinstance(messages, list):
        raise invalid("messages", "'messages' must be a list of messages.")
    if not messages:
        raise invalid("messages", "'messages' must hold at least one message.")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise invalid(where, f"'{where}' must be an object.")
    role = message.get("role")
    if role not in ROLES:
        raise invalid(
            f"{where}.role", f"Invalid value for '{where}.role': supported are {', '.join(ROLES)}."
        )
    calls = message.get("tool_calls")
    if calls is not None:
        _check_tool_calls(calls, f"{where}.tool_calls")
    content = message.get("content")
    if content is None:
        if role == "assistant" and any(message.get(field) for field in _INSTEAD_OF_CONTENT):
            return
        raise invalid(
            f"{where}.content",
            f"Missing required parameter: '{where}.content'.",
            "missing_parameter",
        )
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid(
            f"{where}.content", f"'{where}.content' must be a string or a list of content parts."
        )
    for index, part in enumerate(content):
        _check_part(part, f"{where}.content[{index}]")


def _check_tool_calls(calls: Any, where: str) -> None:
    """Check the calls of a message: vLLM takes anything iterable for a list of them, also text."""
    if not isinstance(calls, list):
        raise invalid(where, f"'{where}' must be a list of tool calls.")
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        if not isinstance(call, dict):
            raise invalid(place, f"'{place}' must be an object.")
        if call.get("type", "function") != "function":
            raise invalid(f"{place}.type", f"'{place}.type' must be 'function'.")
        function = call.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{place}.function", f"'{place}.function' must be an object.")
        for field in ("name", "arguments"):
            if not isinstance(function.get(field), str):
                field = f"{place}.function.{field}"
                raise invalid(field, f"'{field}' must be a string.")
        for field in ("id", "type"):
            _require(call, place, field, str)


def check_items(items: Any) -> None:
    """Check input items of Responses where vLLM's model lets anything through.

    These are the roles, and the ids that connect calls with their results.
    """
    for index, item in enumerate(items if isinstance(items, list) else ()):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(where, f"'{where}' must be an object.")
        if "role" in item and item["role"] not in ROLES:
            field = f"{where}.role"
            raise invalid(field, f"Invalid value for '{field}': supported are {', '.join(ROLES)}.")
        _check_members(item, where, _CALLS)


def check_blocks(payload: Mapping[str, Any]) -> None:
    """Check the content blocks of Messages: that they have their content, and that a system prompt
    is text. Refuse changes of the tools: their definitions would be no part of `tools`, which is
    what is checked."""
    _check_blocks(payload.get("system"), "system", system=True)
    messages = payload.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            place, system = f"messages[{index}].content", message.get("role") == "system"
            _check_blocks(message.get("content"), place, system=system)


def _check_blocks(content: Any, where: str, *, system: bool) -> None:
    for index, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        place, kind = f"{where}[{index}]", block.get("type")
        if kind in _TOOL_CHANGES:
            raise invalid(
                f"{place}.type",
                f"'{place}': this server takes no blocks of type '{kind}'; send the tools that are "
                "in force as 'tools'.",
            )
        if system and isinstance(kind, str) and kind not in _SYSTEM_BLOCKS:
            raise invalid(f"{place}.type", f"'{place}.type' must be 'text': it is a system prompt.")
        _check_members(block, place, _BLOCKS)


def _check_members(
    item: dict[str, Any], where: str, required: Mapping[str, Mapping[str, type]]
) -> None:
    """Check that an item or a block has the fields that `required` lists for its type."""
    kind = item.get("type")
    for name, wanted in required.get(kind if isinstance(kind, str) else "", {}).items():
        _require(item, where, name, wanted)


def _require(item: dict[str, Any], where: str, name: str, wanted: type) -> None:
    """Raise ApiError unless the item at `where` has the field, as an object or a string."""
    if isinstance(item.get(name), wanted):
        return
    field = f"{where}.{name}"
    if name not in item:
        raise invalid(field, f"Missing required parameter: '{field}'.", "missing_parameter")
    what = "an object" if wanted is dict else "a string"
    raise invalid(field, f"'{field}' must be {what}.")


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, f"'{where}' must be an object with a 'type'.")
    if kind in TEXT_PARTS:
        field = TEXT_PARTS[kind]
        if not isinstance(part.get(field), str):
            raise invalid(f"{where}.{field}", f"'{where}.{field}' must be a string.")
    elif kind not in MEDIA and kind not in _OTHER_PARTS:
        known = ", ".join((*TEXT_PARTS, *_OTHER_PARTS))
        raise invalid(f"{where}.type", f"Invalid value for '{where}.type': supported are {known}.")


def check_media(items: Any, where: str) -> None:
    """Refuse images, sounds, videos and files, for a model that takes text only.

    vLLM might fetch what a URL names before it refuses.
    """
    if not isinstance(items, list):
        return
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            continue
        place = f"{where}[{index}]"
        kind = item.get("type")
        if (isinstance(kind, str) and kind in MEDIA) or not MEDIA.isdisjoint(item):
            raise invalid(place, f"'{place}' is not text, and this model takes text only.")
        for field in ("content", "output"):
            check_media(item.get(field), f"{place}.{field}")


def check_tools(payload: Mapping[str, Any]) -> None:
    """Check that tools name a function: a missing `function` is a 500 in vLLM's own server."""
    tools = payload.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list):
        raise invalid("tools", "'tools' must be a list of tools.")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise invalid(f"{where}.type", f"'{where}.type' must be 'function'.")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(
                f"{where}.function", f"'{where}.function' must be an object with a 'name'."
            )
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise invalid(
                f"{where}.function.parameters",
                f"'{where}.function.parameters' must be a JSON schema object.",
            )
